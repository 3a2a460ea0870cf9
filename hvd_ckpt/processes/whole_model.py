"""The whole model, of which each process may have a part: what the core asks, which knows nothing of stages and parts.

Norms and states are of the whole model, from those of this part's slices. Shapes are those of the first part, the same on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import Cut, cut_of

# What parts exchange is imported where there are several: most models are on one process as a whole.

# ------------------------------------------------------------------------------------ norms and shapes


def is_split() -> bool:
    """Whether layers are split over parts."""
    return current().tensor > 1


def norms(own: Tensor, parameters: Sequence[Tensor], order: float) -> Tensor:
    """Norms of the gradients of whole parameters, from those of this part's slices. Collective over the parts."""
    split = torch.tensor([cut_of(parameter) is not None for parameter in parameters], device=own.device)
    if current().tensor == 1 or not split.any():
        return own
    from hvd_ckpt.processes.parts import gather

    rows = torch.stack(gather(own[split]))
    joined = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, 0)
    return own.index_put((split,), joined)


def maximum(own: Tensor) -> Tensor:
    """The greatest of each element over all parts. Collective over the parts."""
    if current().tensor == 1:
        return own
    from hvd_ckpt.processes.parts import maximum as of_parts

    return of_parts(own)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which one process measures: nothing is exchanged, and every other part counts as having zeros."""
    from hvd_ckpt.processes.parts import alone as without_parts

    with without_parts():
        yield


def shape_of_first(parameter: Tensor) -> list[int]:
    """The shape that the first part has of a parameter; the longest."""
    shape, cut = list(parameter.shape), cut_of(parameter)
    if cut is not None:
        shape[cut.dim] = cut.length(current().tensor, 0)
    return shape


def is_uneven(parameter: Tensor) -> bool:
    """Whether the parts have slices of different sizes of a parameter."""
    cut, parts = cut_of(parameter), current().tensor
    return cut is not None and cut.length(parts, 0) != cut.length(parts, parts - 1)


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
    entries: dict[int, dict[str, Any]] = {}
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
    from hvd_ckpt.processes.parts import gather

    count, shapes = current().tensor, []
    for part in range(count):
        shape = list(own.shape)
        shape[cut.dim] = cut.length(count, part)
        shapes.append(shape)
    return cut.whole(gather(own, shapes))
