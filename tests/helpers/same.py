"""Comparison of tensors, and of what holds them, bit for bit or within a tolerance."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor, nn

import hvd_ckpt as hc


def assert_same(one: Any, other: Any, tolerance: float = 0.0, place: str = "values") -> None:
    """The same values, with tensors bit for bit, or within this relative difference, or a tenth of it absolute."""
    if isinstance(one, Tensor) and tolerance:
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance / 10, msg=lambda text: f"{place}: {text}"
        )
    elif isinstance(one, Tensor):
        assert isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (each, that) in enumerate(zip(one, other)):
            assert_same(each, that, tolerance, f"{place}.{number}")
    else:
        assert one == other, place


def same(one: Any, other: Any) -> bool:
    """Whether two are equal in type, order, strides and every bit (but nan's)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
            return False
        ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(ours, theirs)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    """The gradients of the parameters."""
    return [parameter.grad for module in modules for parameter in module.parameters()]


def whole_weights(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of the parameters of a distributed optimizer's model, by name. Collective."""
    with optimizer.gathered_parameters():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(
    model: nn.Module, optimizer: Any, wanted: nn.Module, plain: Any, exact: bool = True
) -> None:
    """The weights of both are the same: bit for bit on two ranks, which add up in one order alone. Collective."""
    tolerance = 0.0 if exact and hc.size() <= 2 else 1e-5
    assert_same(whole_weights(model, optimizer), whole_weights(wanted, plain), tolerance)
