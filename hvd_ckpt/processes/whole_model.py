"""The whole model, of which each process may have a part: what the core asks, which knows nothing of stages and parts.

Norms and states are of the whole model, from those of this part's slices. Shapes are those of the first part, the same on all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.processes.parts import alone as alone
from hvd_ckpt.utils.cuts import Cut, cut_of

# ------------------------------------------------------------------------------------ norms and shapes


_PLACE = "_hvd_ckpt_place"


def is_split() -> bool:
    """Whether this process has only a part of the model."""
    return current().model_parallel_size > 1


def number_parameters(model: nn.Module) -> None:
    """Notes the place of each parameter in the whole model, before this process keeps only its own."""
    for place, parameter in enumerate(model.parameters()):
        setattr(parameter, _PLACE, place)


def gradient_norms(chosen: Sequence[Tensor], order: float) -> tuple[Tensor, set[torch.dtype]]:
    """Norms of all gradients of the whole model, in the order of its parameters, and their dtypes. Collective over stages and
    parts.

    Args:
        chosen: parameters on this process; at least one.

    Raises:
        ValueError: in a job with stages, one is not a parameter of a pipeline.
    """
    trained = [parameter for parameter in chosen if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    own = [torch.linalg.vector_norm(gradient, order).double() for gradient in gradients]
    whole = norms(torch.stack(own), trained, order).cpu() if own else torch.empty(0, dtype=torch.float64)
    dtypes = {gradient.dtype for gradient in gradients}
    if current().stages == 1:
        return whole, dtypes
    places = {parameter: getattr(parameter, _PLACE, None) for parameter in chosen}
    if None in places.values():
        raise ValueError("clip_grad_norm_: in a job with stages, give parameters of the hc.Pipeline")
    measured = dict(zip((places[parameter] for parameter in trained), whole.tolist()))
    # Copies of a tied parameter have equal norms, one of which counts.
    stages, dtypes = over_stages(measured, dtypes)
    found = dict(item for norms_of_stage in stages for item in norms_of_stage.items())
    return torch.tensor([found[place] for place in sorted(found)], dtype=torch.float64), dtypes


def over_stages(own: Any, dtypes: Collection[torch.dtype]) -> tuple[list[Any], set[torch.dtype]]:
    """What each stage has, and the dtypes on any stage. Collective over the stages."""
    values, found = zip(*current().gather_objects((own, set(dtypes)), parts=False))
    return list(values), set[torch.dtype]().union(*found)


def norms(own: Tensor, parameters: Sequence[Tensor], order: float) -> Tensor:
    """Norms of the gradients of whole parameters, from those of this part's slices. Collective over the parts."""
    split = torch.tensor([cut_of(parameter) is not None for parameter in parameters], device=own.device)
    if current().tensor == 1 or not split.any():
        return own
    rows = torch.stack(parts.gather(own[split]))
    joined = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, 0)
    return own.index_put((split,), joined)


def maximum(own: Tensor) -> Tensor:
    """The greatest of each element over all parts. Collective over the parts."""
    return own if current().tensor == 1 else parts.maximum(own)


def shape_of_first(parameter: Tensor) -> list[int]:
    """The shape that the first part has of a parameter; the longest."""
    shape, cut = list(parameter.shape), cut_of(parameter)
    if cut is not None:
        shape[cut.dim] = cut.length(current().tensor, 0)
    return shape


def is_uneven(parameter: Tensor) -> bool:
    """Whether the parts have slices of different sizes of a parameter."""
    cut, count = cut_of(parameter), current().tensor
    return cut is not None and cut.length(count, 0) != cut.length(count, count - 1)


# ------------------------------------------------------------------------------------ states


def state(own: dict[str, Any], model: nn.Module, everywhere: bool) -> dict[str, Any] | None:
    """The state dict of the whole model, of this part's; on part 0 or on all parts, and None on the others.

    Collective over the parts of those replicas that have a state.
    """
    if current().tensor == 1:
        return own
    known: dict[int, Tensor] = {}  # tied weights, which remain so
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (cut := cut_of(tensor)) is not None:
            if id(tensor) not in known:
                known[id(tensor)] = _whole(own[name], cut)
            own[name] = known[id(tensor)]
    return own if everywhere or current().part == 0 else None


def optimizer_state(
    own: dict[str, Any], parameters: Iterable[Tensor], everywhere: bool
) -> dict[str, Any] | None:
    """The same for the state of an optimizer of these parameters."""
    if current().tensor == 1:
        return own
    entries = {key: kept for key, kept in own["state"].items() if not isinstance(key, int)}  # of no parameter
    for number, parameter in enumerate(parameters):
        if number not in own["state"]:
            continue
        entries[number] = dict(own["state"][number])
        if (cut := cut_of(parameter)) is not None:
            for key, value in entries[number].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    entries[number][key] = _whole(value, cut)
    return {**own, "state": entries} if everywhere or current().part == 0 else None


def _whole(own: Tensor, cut: Cut) -> Tensor:
    count, shapes = current().tensor, []
    for part in range(count):
        shape = list(own.shape)
        shape[cut.dim] = cut.length(count, part)
        shapes.append(shape)
    return cut.whole(parts.gather(own, shapes))
