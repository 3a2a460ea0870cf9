"""The collectives of one optimizer: how its tensors reach the other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, Sum

from hvd_ckpt.reduction import compression as wire_formats
from hvd_ckpt.reduction.agreement import allgather_objects
from hvd_ckpt.reduction.buckets import Bucket
from hvd_ckpt.reduction.sparse import reduce_sparse
from hvd_ckpt.reduction.summed import keep_sum, leave_own_part, mark_summed

POLL_SECONDS = 50e-6
GRADIENTS = "the gradients of all ranks (each must call backward() and optimizer.step())"


def wait(handle: int, name: str = "", awaited: str = "") -> Any:
    """The result of an asynchronous operation, like Horovod's ``synchronize``; but asleep between two looks.

    Horovod's looks without a pause, on a core that the thread which does the work may need.

    Args:
        name, awaited: of the tensor, and in words what is waited for: the watchdog (``stall``) reads them from the stack.
    """
    while not mpi_ops.poll(handle):
        time.sleep(POLL_SECONDS)
    return mpi_ops.synchronize(handle)


@dataclass
class Flight:
    """A bucket on its way: ``wire`` travels, and is written back to ``flat`` on arrival."""

    bucket: Bucket
    handle: int
    flat: torch.Tensor
    wire: torch.Tensor
    context: Any


@dataclass(frozen=True)
class Wire:
    """How tensors are reduced.

    Attributes:
        name: prefix of all tensor names, unique to the optimizer and the same on every rank. It changes when a step is
            abandoned, since its tensors may still be on their way.
        op, prescale_factor, postscale_factor, compression, process_set: as in Horovod.
    """

    name: str
    op: int
    prescale_factor: float
    postscale_factor: float
    compression: Any
    process_set: Any

    @property
    def linear(self) -> bool:
        """A late part can be added to what has been reduced already."""
        return self.op in (Average, Sum)

    @property
    def is_leader(self) -> bool:
        """This is the rank whose order of gradients counts."""
        return bool(self.process_set.rank() == 0)

    @property
    def sums_once(self) -> bool:
        """What is summed already must not be summed again (see :mod:`.summed`)."""
        return bool(self.op == Sum)

    def remember_sums(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remembers that the gradients have been reduced."""
        for parameter in parameters if self.sums_once else ():
            if parameter.grad is not None:
                mark_summed(parameter.grad, self.process_set)

    def keep_sum(self, parameter: torch.Tensor) -> None:
        """A backward pass may be about to add to the parameter's gradient."""
        if self.sums_once and parameter.grad is not None:
            keep_sum(parameter.grad)

    def leave_own_part(self, parameter: torch.Tensor) -> None:
        """Makes a gradient what this rank is to bring to its reduction."""
        if self.sums_once and parameter.grad is not None:
            leave_own_part(parameter.grad, self.process_set, self.is_leader)

    def carries_words(self, bucket: Bucket) -> bool:
        """True if control words, which are float32 and summed, can travel in the bucket's own storage."""
        as_is = wire_formats.travels_as_is(bucket.dtype, self.compression)
        return self.linear and bucket.dtype is torch.float32 and as_is

    def send(self, bucket: Bucket, flat: torch.Tensor) -> Flight:
        """Launches a bucket's allreduce."""
        wire, context = wire_formats.encode(flat, self.compression)
        return Flight(bucket, self._allreduce(wire, f"bucket.{bucket.position}"), flat, wire, context)

    def receive(self, flight: Flight) -> None:
        """Waits for a bucket's allreduce."""
        wait(flight.handle, f"{self.name}.bucket.{flight.bucket.position}", GRADIENTS)
        with torch.no_grad():
            wire_formats.decode(flight.wire, flight.context, self.compression, flight.flat)

    def reduce_single(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Reduces one gradient by itself; returns a dense tensor of its own."""
        with torch.no_grad():
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient.detach()
            result = dense.clone(memory_format=torch.preserve_format)
            flat = result.contiguous().view(-1)
            wire, context = wire_formats.encode(flat, self.compression)
            wait(self._allreduce(wire, f"single.{index}"), f"{self.name}.single.{index}")
            wire_formats.decode(wire, context, self.compression, flat)
            return result.copy_(flat.view(result.shape))

    def reduce_sparse(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Reduces one sparse gradient by itself."""
        return reduce_sparse(gradient, f"{self.name}.sparse.{index}", self.op, self.process_set)

    def sum(self, values: torch.Tensor, what: str) -> Any:
        """The sum of a small tensor over the ranks, as (nested) lists of floats."""
        name = f"{self.name}.{what}.{values.numel()}"
        handle = mpi_ops.allreduce_async_(values, name=name, op=Sum, process_set=self.process_set)
        return wait(handle, name).tolist()

    def gather(self, value: Any, what: str) -> list[Any]:
        """One picklable value of each rank."""
        return allgather_objects(value, self.process_set, f"{self.name}.{what}")

    def _allreduce(self, tensor: torch.Tensor, what: str) -> int:
        handle: int = mpi_ops.allreduce_async_(
            tensor,
            name=f"{self.name}.{what}",
            op=self.op,
            prescale_factor=self.prescale_factor,
            postscale_factor=self.postscale_factor,
            process_set=self.process_set,
        )
        return handle
