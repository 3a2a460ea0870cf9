"""Whole states of a model in parts (tensor parallelism): each part has slices, and one process, or every one, gets all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.cuts import Cut, cut_of


def whole_model_state(
    state: dict[str, Any], model: torch.nn.Module, everywhere: bool
) -> dict[str, Any] | None:
    """The state dict of the whole model, of this part's; on part 0 or on all parts, and None on the others.

    Collective over the parts of those replicas that have a state.
    """
    if current().tensor == 1:
        return state
    known: dict[int, Tensor] = {}  # tied weights, which remain so
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (cut := cut_of(tensor)) is not None:
            if id(tensor) not in known:
                known[id(tensor)] = _whole(state[name], cut)
            state[name] = known[id(tensor)]
    return state if everywhere or current().part == 0 else None


def whole_optimizer_state(
    state: dict[str, Any], parameters: Iterable[Tensor], everywhere: bool
) -> dict[str, Any] | None:
    """The same for the state of an optimizer of these parameters."""
    if current().tensor == 1:
        return state
    entries: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        if number not in state["state"]:
            continue
        entries[number] = dict(state["state"][number])
        if (cut := cut_of(parameter)) is not None:
            for key, value in entries[number].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    entries[number][key] = _whole(value, cut)
    return {**state, "state": entries} if everywhere or current().part == 0 else None


def _whole(own: Tensor, cut: Cut) -> Tensor:
    count, shapes = current().tensor, []
    for part in range(count):
        shape = list(own.shape)
        shape[cut.dim] = cut.length(count, part)
        shapes.append(shape)
    return cut.whole(parts.gather(own, shapes))
