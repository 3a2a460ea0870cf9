"""The communicator of a reducer: allreduces of buckets in their communication dtype, of sparse gradients, and Adasum."""

from __future__ import annotations

import numbers
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression, Compressor, NoneCompressor
from horovod.torch.mpi_ops import Adasum, Average, Sum

from hvd_ckpt.reduction.agreement import allgather_objects
from hvd_ckpt.reduction.buckets import Bucket
from hvd_ckpt.reduction.sums import changed_sum, keep_sum, leave_own_part, mark_summed
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.torch_private import pytree
from hvd_ckpt.utils.waits import waiting_for

__all__ = ["Compression", "Compressor"]

POLL_SECONDS, LONGEST_POLL_SECONDS = 50e-6, 5e-3
POLL_GROWTH = 1.02  # so that a pause is at most 2 % of the wait so far
LONG_SECONDS = 10.0
# Horovod counts the elements of a message, and the bytes that a rank brings to one, in 32 bits.
LARGEST = 2**31 - 1
long_waits: set[weakref.WeakMethod[Callable[[float], None]]] = set()
"""Called now and then, with its begin, while a wait lasts longer than that; they raise where it can never end."""
GRADIENTS = "the gradients of all ranks (each must call backward() and optimizer.step())"


def wait(handle: int, name: str = "", awaited: str = "") -> Any:
    """The result of an asynchronous operation, like Horovod's ``synchronize``; but asleep between two looks.

    Horovod's looks without a pause, on a core that the thread which does the work may need.

    Args:
        name: of the tensor; the watchdog reads it from the stack.
        awaited: in words what is waited for, which it says in place of that.
    """
    with span("wait", lambda: f"wait for {name}"), waiting_for(awaited):
        begun = time.monotonic()
        for _ in pauses():
            if mpi_ops.poll(handle):
                break
            if long_waits and time.monotonic() - begun > LONG_SECONDS:
                for check in [reference() for reference in long_waits]:
                    if check is not None:
                        check(begun)
        # Returns at once now, with the result, or raises the error of the operation.
        result = mpi_ops.synchronize(handle)
        for tensor in pytree.tree_leaves(result):
            if tensor.is_cuda:  # Horovod's thread may have allocated it, on the default stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return result


def forget_handle(handle: int) -> None:
    """Drops what Horovod keeps for an asynchronous operation that nobody waits for."""
    mpi_ops._handle_map.pop(handle, None)


def pauses() -> Iterator[None]:
    """Pauses of a loop that waits, longer and longer: first none, then 50 us, at last 5 ms."""
    seconds = POLL_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * POLL_GROWTH, LONGEST_POLL_SECONDS)


class Work:
    """A collective in flight, as in torch.distributed; holds all tensors that it needs."""

    def __init__(
        self, named_handles: Sequence[tuple[str, int]], finish: Callable[[list[Any]], torch.Tensor]
    ) -> None:
        self._pending = named_handles
        self._finish: Callable[[list[Any]], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        """True once all messages are here: :meth:`wait` will not sleep, but may still have to decode and add."""
        return all(mpi_ops.poll(handle) for _, handle in self._pending)

    def wait(self, awaited: str = "") -> torch.Tensor:
        """The result; asleep until all messages are here. A second call returns the same tensor.

        Args:
            awaited: in words what is waited for, for the line that says so when it does not come.

        Raises:
            horovod.common.exceptions.HorovodInternalError: another rank is gone.
        """
        if self._finish is not None:
            # Given up first: if this fails, Horovod has dropped the handle, and a second call must
            # raise instead of going without a result.
            pending, self._pending = self._pending, ()
            finish, self._finish = self._finish, None
            with torch.no_grad():
                self._result = finish([wait(handle, name, awaited) for name, handle in pending])
        if self._result is None:
            raise RuntimeError("this collective has failed before; start the step again")
        return self._result

    def advance(self, block: bool, awaited: str = "") -> None:
        """Sends what follows on messages that are here; for work of several messages, one after the other.

        Args:
            block: waits for those messages.
            awaited: as in :meth:`wait`.
        """

    def then(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Work:
        """This work, with another result; wait for the new one instead."""
        finish = self._finish
        assert finish is not None
        return Work(self._pending, lambda results: change(finish(results)))

    @classmethod
    def joined(cls, works: Sequence[Work], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Work:
        """One work of several, whose result ``join`` makes of theirs; wait for it instead of them."""

        def finish(results: list[Any]) -> torch.Tensor:
            parts = []
            for work in works:
                assert work._finish is not None
                own, results = results[: len(work._pending)], results[len(work._pending) :]
                parts.append(work._finish(own))
            return join(parts)

        return cls([pair for work in works for pair in work._pending], finish)

    def forget(self) -> None:
        """Drops what is not waited for; it completes by itself."""
        for _, handle in self._pending:
            forget_handle(handle)
        self._pending, self._finish = (), None


def most_columns(rows: int, itemsize: int) -> int:
    """The most columns of a message [rows, any] that Horovod can carry."""
    return max(min(LARGEST // rows, LARGEST // itemsize), 1)


@dataclass(frozen=True)
class Communicator:
    """The operation and the ranks of all reductions of one optimizer.

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
        """This is rank 0 of the process set, whose order of gradients counts."""
        return bool(self.process_set.rank() == 0)

    @property
    def sums_once(self) -> bool:
        """Keeps a gradient that is summed already from being summed again (see :mod:`.sums`)."""
        return bool(self.op == Sum)

    def remember_sums(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remembers that the gradients have been reduced."""
        for parameter in parameters if self.sums_once else ():
            mark_summed(parameter, self.process_set)

    def changed_sum(self, parameter: torch.Tensor) -> None:
        """The parameter's gradient was changed by a backward pass, or by all ranks alike."""
        if self.sums_once and parameter.grad is not None:
            changed_sum(parameter.grad)

    def keep_sum(self, parameter: torch.Tensor) -> None:
        """A backward pass may be about to add to the parameter's gradient."""
        if self.sums_once and parameter.grad is not None:
            keep_sum(parameter.grad)

    def leave_own_part(self, parameter: torch.Tensor) -> None:
        """Makes a gradient what this rank is to bring to its reduction."""
        if self.sums_once and parameter.grad is not None:
            leave_own_part(parameter.grad, self.process_set, self.is_leader)

    def carries_flags(self, bucket: Bucket) -> bool:
        """True if control flags, which are float32 and summed, can travel in the bucket's own storage."""
        return self.linear and bucket.dtype is torch.float32 and self.compression is NoneCompressor

    @property
    def flag_scale(self) -> float:
        """What the sum of control flags is multiplied by where they travel in a bucket."""
        average = self.process_set.size() if self.op == Average else 1
        return self.prescale_factor * self.postscale_factor / average

    def send(self, bucket: Bucket, flat: torch.Tensor) -> Work:
        """Launches a bucket's allreduce; its result is ``flat``."""
        wire, context = encode(flat, self.compression)
        what = f"bucket.{bucket.position}"

        def finish(_: list[Any]) -> torch.Tensor:
            decode(wire, context, self.compression, flat)
            return flat

        return Work([(f"{self.name}.{what}", self._allreduce(wire, what))], finish)

    def reduce_single(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Reduces one gradient by itself; returns a dense tensor of its own."""
        with torch.no_grad():
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient.detach()
            result = dense.clone(memory_format=torch.preserve_format)
            flat = result.contiguous().view(-1)
            wire, context = encode(flat, self.compression)
            wait(self._allreduce(wire, f"single.{index}"), f"{self.name}.single.{index}")
            decode(wire, context, self.compression, flat)
            return result.copy_(flat.view(result.shape))

    def reduce_sparse(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The sum (or mean, for ``Average``) of a sparse COO gradient over the ranks, coalesced.

        Each rank may bring another number of entries. They are summed in rank order, so the result is repeatable.
        """
        gradient = gradient.coalesce()
        values = gradient.values()
        # Horovod gathers no bfloat16; an empty tensor and a longer one are joined along the first dimension.
        wire = values if values.dtype in (torch.float16, torch.float32, torch.float64) else values.float()
        prefix = f"{self.name}.sparse.{index}"
        parts = {f"{prefix}.indices": gradient.indices().t(), f"{prefix}.values": wire}
        handles = {
            name: mpi_ops.allgather_async(tensor.contiguous(), name, self.process_set)
            for name, tensor in parts.items()
        }
        indices, gathered = (wait(handle, name, GRADIENTS) for name, handle in handles.items())
        if self.op == Average:
            gathered = gathered / self.process_set.size()
        summed = torch.sparse_coo_tensor(indices.t(), gathered, gradient.shape, check_invariants=False)
        return summed.coalesce().to(gradient.dtype)

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
    mean, others = wait(
        mpi_ops.allreduce_async_(own, name=name, op=Average, process_set=process_set), name
    ).unbind()
    if others > 0:
        return value
    return mean.reshape(value.shape).to(value.dtype) if is_tensor else mean.item()


# Wire formats: what a bucket looks like while it travels.
#
# Horovod's ``Compression.none`` and ``Compression.fp16`` (and any class with their two static methods) apply to whole buckets.
# On top of that every dtype that Horovod cannot reduce is given one that it can: bfloat16 travels as float32, complex numbers
# as pairs of reals.


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of ``dtype`` are added: float32 for narrower floating point numbers, else their own."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


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
    """Writes the reduced ``wire`` back to ``flat``; nothing to do where it travelled in place."""
    if flat.dtype.is_complex and not wire.dtype.is_complex:
        wire = torch.view_as_complex(wire)
    if wire.data_ptr() == flat.data_ptr() and wire.dtype == flat.dtype:
        return
    flat.copy_(compression.decompress(wire, context))


def empty_sparse_like(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A sparse zero gradient of ``parameter`` with ``sparse_dim`` sparse dimensions."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


# Adasum: combines the ranks' *updates*, not their gradients.
#
# As in Horovod (and Maleki et al. 2021, "Scaling distributed training with adaptive summation"): each rank steps on its own
# gradients, and the difference it made to each parameter is combined with the others' by Adasum. Adasum is not linear, so it
# is done per tensor, when all gradients are final, in a fixed order; nothing is reduced during the backward pass.


def adasum_unavailable() -> str | None:
    """Why Adasum cannot be used in this job, or None."""
    ranks = mpi_ops.size()
    if ranks & (ranks - 1):
        return f"op=Adasum needs a number of ranks that is a power of two, not {ranks}"
    if not mpi_ops.mpi_enabled():
        return "op=Adasum needs MPI, and this job runs over Gloo; launch it with `horovodrun --mpi` or mpirun, or use op=Average"
    return None


def adasum_step(
    named_parameters: Sequence[tuple[str, torch.Tensor]],
    local_step: Callable[[], Any],
    identity: int,
    compression: Any,
) -> None:
    """Runs ``local_step()`` and replaces every parameter's change by the Adasum of all ranks' changes.

    Args:
        named_parameters: all parameters, in the same order on every rank.
        local_step: the wrapped optimizer's own step on this rank's gradients.
    """
    # Adasum needs every rank for each tensor. A parameter that one rank has used is therefore combined on all, changed or not.
    flags = torch.tensor(
        [parameter.grad is not None for _, parameter in named_parameters], dtype=torch.float32
    )
    used = mpi_ops.synchronize(
        mpi_ops.allreduce_async_(flags, name=f"hvd_ckpt.{identity}.adasum.flags", op=Sum)
    ).tolist()
    moving = [(name, parameter) for (name, parameter), ranks in zip(named_parameters, used) if ranks]
    with torch.no_grad():
        starts = [parameter.detach().clone() for _, parameter in moving]
    local_step()
    with torch.no_grad():
        for (name, parameter), start in zip(moving, starts):
            change = parameter.detach() - start
            flat = change.contiguous().view(-1)
            wire, context = encode(flat, compression)
            mpi_ops.synchronize(
                mpi_ops.allreduce_async_(wire, name=f"hvd_ckpt.{identity}.adasum.{name}", op=Adasum)
            )
            decode(wire, context, compression, flat)
            parameter.copy_(start.add_(flat.view(change.shape)))
