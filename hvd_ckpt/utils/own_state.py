"""State of modules that each rank has of its own: buffers, and what ``get_extra_state()`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def own_state(model: nn.Module) -> dict[str, Any]:
    """The buffers and extra states of a model, by name, not copied."""
    return {"buffers": dict(model.named_buffers()), "extra": extra_states(model)}


def load_own_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what :func:`own_state` returned on this rank."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])
    set_extra_states(model, state["extra"])


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The extra states, by name of the module."""
    return {name: module.get_extra_state() for name, module in with_extra_state(model)}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Gives modules their extra states; others keep theirs."""
    for name, module in with_extra_state(model):
        if name in states:
            module.set_extra_state(states[name])


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have a ``get_extra_state()``, and their names."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
