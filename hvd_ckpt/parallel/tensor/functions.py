"""Megatron's autograd functions: linear maps among the parts, each with its transpose as backward pass.

A split region begins with :func:`enter` (Megatron's f) and ends with :func:`leave` (g). Outside, all parts have the same values
and gradients, bit for bit, so parameters there need no reduction among the parts. With sequence parallelism, each part has a share
of the positions outside, and f and g become an all-gather and a reduce-scatter (Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvd_ckpt.processes import parts
from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils.torch_private import DisableTorchFunction, disable_dynamo

POSITIONS = 1  # the dimension of positions in hidden states, (batch, positions, width)

# Kinds of tensors around split layers. A tensor that is split may be so for shares of the positions, so kinds are joined by "or".
WHOLE = 0  # equal on all parts, and so is its gradient
SHARE = 1  # this part's share of the positions
SPLIT = 2  # this part's heads or features
ENTERED = 4  # equal on all parts, but a gradient of this part's heads, features or positions alone

_KIND = "_hvd_ckpt_kind"

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear map and its transpose."""

    # A tape that watches torch functions (hvd_ckpt.recompute.tape) must not see those of a sum: it would repeat them
    # without the messages.

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transpose: Map, kind: int) -> Tensor:
        ctx.transpose, ctx.hvd_ckpt_kind = transpose, kind
        with DisableTorchFunction():
            return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with DisableTorchFunction():
            return ctx.transpose(gradient), None, None, None


@disable_dynamo
def _apply(x: Tensor, forward: Map, transpose: Map, kind: int) -> Tensor:
    result: Tensor = _Linear.apply(x, forward, transpose, kind)  # type: ignore[no-untyped-call]
    return mark_kind(result, kind)


def kind_of(x: Tensor) -> int | None:
    """The kind that was noted of a tensor; None if none was."""
    return x.__dict__.get(_KIND)


def mark_kind(x: Tensor, kind: int) -> Tensor:
    """Notes the kind of a tensor, and returns it."""
    x.__dict__[_KIND] = kind
    return x


def unchanged(x: Tensor) -> Tensor:
    """The same values, and in the backward pass the same gradient."""
    return x.view_as(x)


def enter(x: Tensor) -> Tensor:
    """The same values; in the backward pass the sum of the parts' gradients."""
    # Whether x requires a gradient is the same on all parts, so that none waits for a sum that another one leaves out.
    return _apply(x, unchanged, parts.add, ENTERED) if x.requires_grad else x


def leave(x: Tensor) -> Tensor:
    """The sum of the parts' values; in the backward pass the same gradient."""
    return _apply(x, parts.add, unchanged, WHOLE)


def gather_last(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The parts' values, which have these lengths, along the last dimension; in the backward pass this part's gradient."""
    part, shapes = current().part, [(*x.shape[:-1], length) for length in lengths]
    return _apply(
        x,
        lambda x: torch.cat(parts.gather(x, shapes), -1),
        lambda gradient: torch.split(gradient, list(lengths), -1)[part],
        WHOLE,
    )


def enter_positions(x: Tensor) -> Tensor:
    """All positions of those that each part has; in the backward pass this part's of the sum of the parts' gradients."""
    with parts.inside("sequence"):
        return _apply(x, _gather_positions, _sum_own_positions, SHARE | ENTERED)


def leave_positions(x: Tensor) -> Tensor:
    """This part's positions of the sum of the parts' values; in the backward pass the gradients of all positions."""
    return _apply(x, _sum_own_positions, _gather_positions, SHARE)


def split_positions(x: Tensor) -> Tensor:
    """This part's positions of a tensor that is equal on all parts; in the backward pass the gradients of all positions.

    Raises:
        ValueError: the number of parts does not divide that of positions.
    """
    count = current().tensor
    if x.dim() <= POSITIONS or x.shape[POSITIONS] % count:
        raise ValueError(
            f"tensor_parallel(sequence=True): hidden states of shape {tuple(x.shape)} have no number of positions that "
            f"tensor={count} divides; pad the sequences"
        )
    return _apply(x, _own_positions, _gather_positions, SHARE)


def join_positions(x: Tensor) -> Tensor:
    """All positions, from those of each part; in the backward pass this part's gradient of a tensor that is equal on all parts."""
    return _apply(x, _gather_positions, _own_positions, WHOLE)


def _gather_positions(x: Tensor) -> Tensor:
    return torch.cat(parts.gather(x), POSITIONS)


def _sum_own_positions(x: Tensor) -> Tensor:
    return parts.reduce_scatter(x, POSITIONS)


def _own_positions(x: Tensor) -> Tensor:
    # A copy, since a view would keep all positions in memory.
    return x.chunk(current().tensor, POSITIONS)[current().part].clone(memory_format=torch.contiguous_format)
