"""``horovod.torch.reducescatter`` and its three relatives, with a ``prescale_factor`` that needs no fusion buffer.

Horovod scales the input in its fusion buffer, and refuses an input that is larger. With fusion off, every input is larger. Here
the input is scaled before Horovod gets it, by the same arithmetic. Arguments, results and gradients are the same as Horovod's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, ProcessSet, Sum, global_process_set


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`reducescatter`, without gradients or compression; returns a handle for ``poll`` and ``synchronize``."""
    with torch.no_grad():
        scaled = _scaled(tensor, prescale_factor)
    handle: int = mpi_ops.reducescatter_async(
        scaled, name, op, process_set, postscale_factor=postscale_factor
    )
    return handle


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the reduction of ``tensor`` over the ranks, as by ``horovod.torch.reducescatter``.

    Args:
        tensor: of one or more dimensions, of the same shape on every rank; it is not modified.
        name: name of the operation; Horovod numbers unnamed ones.
        compression: the communication format of the input.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies the input, before the reduction. Integers are rounded towards zero.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows. The first dimension is divided over the ranks; if it is not a multiple of their number, earlier ranks
        have one more.
    """
    return grouped_reducescatter(
        [tensor],
        name,
        compression,
        op,
        process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`grouped_reducescatter`, without gradients or compression; returns a handle."""
    with torch.no_grad():
        scaled = [_scaled(tensor, prescale_factor) for tensor in tensors]
    handle: int = mpi_ops.grouped_reducescatter_async(
        scaled, name, op, process_set, postscale_factor=postscale_factor
    )
    return handle


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, which start together."""
    wires = [compression.compress(tensor) for tensor in tensors]
    scaled = [_scaled(wire, prescale_factor) for wire, _ in wires]
    results = _ReduceScatter.apply(name, op, process_set, postscale_factor, *scaled)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, context) for result, (_, context) in zip(results, wires)]


class _ReduceScatter(torch.autograd.Function):
    """Horovod's, with gradients gathered under a name of the forward pass: an unnamed gather may differ between ranks, and hang."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, process_set: ProcessSet, factor: float, *tensors: torch.Tensor
    ) -> Any:
        handle = mpi_ops.grouped_reducescatter_async(
            list(tensors), name, op, process_set, postscale_factor=factor
        )
        ctx.name = f"{name or f'reducescatter.{handle}'}.gradient"
        # Horovod's convention: the gradient of a sum is multiplied by the number of ranks, that of an average is not.
        ctx.process_set, ctx.factor = process_set, factor * (process_set.size() if op == Sum else 1)
        return tuple(mpi_ops.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        handle = mpi_ops.grouped_allgather_async(scaled, ctx.name, ctx.process_set)
        return None, None, None, None, *mpi_ops.synchronize(handle)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)
