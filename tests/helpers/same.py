"""Comparison of tensors bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def assert_same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    """The same tensors bit for bit, and None in the same places."""
    assert len(left) == len(right)
    for one, other in zip(left, right):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    """The gradients of the parameters."""
    return [parameter.grad for module in modules for parameter in module.parameters()]
