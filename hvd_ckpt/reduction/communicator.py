"""The communicator of a reducer: allreduces of buckets in their communication dtype, and of sparse gradients."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression, Compressor
from horovod.torch.mpi_ops import Average, Sum

from hvd_ckpt.collectives.asynchronous import Collectives, Work
from hvd_ckpt.reduction.buckets import Bucket

__all__ = ["Compression", "Compressor"]


class Communicator(Collectives):
    """The reductions of one optimizer, with arguments as in Horovod, and the prefix of their names, which the reducer sets."""

    def __init__(
        self,
        process_set: Any,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = Compression.none,
    ) -> None:
        super().__init__(process_set, "")
        self.op, self.compression = op, compression
        self.prescale_factor, self.postscale_factor = prescale_factor, postscale_factor

    @property
    def linear(self) -> bool:
        """A late part can be added to what has been reduced already."""
        return self.op in (Average, Sum)

    @property
    def flag_scale(self) -> float:
        """Factor of the sum of control flags, if they are sent in a bucket."""
        average = self.process_set.size() if self.op == Average else 1
        return self.prescale_factor * self.postscale_factor / average

    def send(self, bucket: Bucket, flat: torch.Tensor, what: str) -> Work:
        """Launches the reduction of what lies in a bucket; each rank gets all of the result, which may be ``flat``."""
        wire, context = encode(flat, self.compression)
        name = f"{self.prefix}.{what}"
        handle = mpi_ops.allreduce_async_(
            wire,
            name=name,
            op=self.op,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            process_set=self.process_set,
        )

        def finish(_: list[Any]) -> torch.Tensor:
            decode(wire, context, self.compression, flat)
            return flat

        return Work([(name, handle)], finish)


def mean_over_ranks(value: Any, name: str, process_set: Any) -> Any:
    """The mean over the ranks where each has a real number or a tensor with one, as such; else this rank's value. Collective."""
    is_tensor = isinstance(value, torch.Tensor)
    real = value.numel() == 1 and not value.is_complex() if is_tensor else isinstance(value, numbers.Real)
    real = real and not isinstance(value, bool)
    # The second number counts the ranks without a real number. If there is one, each rank keeps its own value.
    own = torch.tensor(
        [float(value.detach() if is_tensor else value) if real else 0.0, not real],
        dtype=torch.float64,
        device=value.device if is_tensor and real else None,
    )
    mean, others = Collectives(process_set, name).allreduce(own, "mean", Average).wait().unbind()
    if others > 0:
        return value
    return mean.reshape(value.shape).to(value.dtype) if is_tensor else mean.item()


# Wire formats: what a bucket looks like while it travels.
#
# Horovod's ``Compression.none`` and ``Compression.fp16`` (and any class with their two static methods) apply to whole buckets.
# On top of that every dtype that Horovod cannot reduce is given one that it can: bfloat16 travels as float32, complex numbers
# as pairs of reals.


_REDUCIBLE = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


def encode(flat: torch.Tensor, compression: Any) -> tuple[torch.Tensor, Any]:
    """The tensor to reduce for ``flat`` (1-D), and the context that :func:`decode` needs."""
    wire, context = compression.compress(flat)
    if wire.dtype.is_complex:
        wire = torch.view_as_real(wire)
    elif wire.dtype not in _REDUCIBLE:
        wire = wire.to(torch.float32)
    return wire, context


def decode(wire: torch.Tensor, context: Any, compression: Any, flat: torch.Tensor) -> None:
    """Writes the reduced ``wire`` back to ``flat``; does nothing if it was sent in place."""
    if flat.dtype.is_complex and not wire.dtype.is_complex:
        wire = torch.view_as_complex(wire)
    if wire.data_ptr() == flat.data_ptr() and wire.dtype == flat.dtype:
        return
    flat.copy_(compression.decompress(wire, context))
