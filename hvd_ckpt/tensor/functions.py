"""Megatron's two autograd functions, and the gathering of scores.

Between them lies what is split: a region begins with :func:`enter` (Megatron's f) and ends with :func:`leave` (g). Outside, all
parts have the same values and gradients, bit for bit, so parameters there need no reduction among the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.torch_private import DisableTorchFunction, disable_dynamo


@disable_dynamo
def enter(x: Tensor) -> Tensor:
    """The same values; in the backward pass the sum of the parts' gradients."""
    result: Tensor = _Enter.apply(x)  # type: ignore[no-untyped-call]
    return result


@disable_dynamo
def leave(x: Tensor) -> Tensor:
    """The sum of the parts' values; in the backward pass the same gradient."""
    result: Tensor = _Leave.apply(x)  # type: ignore[no-untyped-call]
    return result


@disable_dynamo
def gather_last(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The parts' values one after the other along the last dimension; in the backward pass this part's gradient.

    Args:
        lengths: of that dimension on each part.
    """
    result: Tensor = _Gather.apply(x, lengths)  # type: ignore[no-untyped-call]
    return result


@disable_dynamo
def share(x: Tensor, parts: int) -> Tensor:
    """The same values; in the backward pass 1 / ``parts`` of the gradient, which a sum over the parts makes whole again."""
    result: Tensor = _Share.apply(x, parts)  # type: ignore[no-untyped-call]
    return result


# A tape that watches torch functions (hvd_ckpt.recompute.tape) must not see those of a sum: it would repeat them
# without the messages.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with DisableTorchFunction():
            return parts.add(gradient)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with DisableTorchFunction():
            return parts.add(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int]) -> Tensor:
        part = current().part
        ctx.range = (sum(lengths[:part]), lengths[part])
        with DisableTorchFunction():
            return torch.cat(parts.gather(x, [(*x.shape[:-1], length) for length in lengths]), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, *ctx.range), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.parts, None
