"""Comparison of tensors bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def assert_same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    """The same tensors bit for bit, and None in the same places."""
    assert len(left) == len(right)
    for one, other in zip(left, right):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


def assert_same_state(one: Any, other: Any, place: str = "") -> None:
    """The same state dicts, with tensors bit for bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same_state(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (each, that) in enumerate(zip(one, other)):
            assert_same_state(each, that, f"{place}.{number}")
    else:
        assert one == other, place


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    """The gradients of the parameters."""
    return [parameter.grad for module in modules for parameter in module.parameters()]


def whole_weights(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of the parameters of a distributed optimizer's model, by name. Collective."""
    with optimizer.gathered_parameters():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
