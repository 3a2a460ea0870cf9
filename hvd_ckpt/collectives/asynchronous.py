"""Asynchronous collectives of a process set, over Horovod: each has a name and returns the work that is under way.

A message that is too large for Horovod is sent in several.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Max, Sum

from hvd_ckpt.collectives.agreement import LARGEST, allgather_objects
from hvd_ckpt.processes.watchdog import waiting
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.torch_private import pytree
from hvd_ckpt.utils.waits import looks

LONG_SECONDS = 10.0
long_waits: set[weakref.WeakMethod[Callable[[float], None]]] = set()
"""Called now and then, with its begin, while a wait lasts longer than that; they raise where it can never end."""
GRADIENTS = "the gradients of all ranks (each must call backward() and optimizer.step())"


def wait(handle: int, name: str = "", awaited: str = "") -> Any:
    """The result of an asynchronous operation, like Horovod's ``synchronize``; asleep until it is there.

    Args:
        name: name of the tensor; the watchdog reads it from the stack.
        awaited: in words what is waited for, which it says in place of that.
    """
    with span("wait", lambda: f"wait for {name}"), waiting(awaited):
        begun = time.monotonic()
        for _ in looks(handle, mpi_ops.mpi_lib):
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


class Work:
    """A collective in flight, as in torch.distributed; holds all tensors that it needs.

    Args:
        named_handles: names and handles of its messages.
        steps: make the result: the first of those of the messages, each other one of the result of the one before. A step may
            begin another collective and return it as work, whose result is then that of the step.
        sends: how many of the steps do that.
    """

    def __init__(
        self, named_handles: Sequence[tuple[str, int]], *steps: Callable[[Any], Any], sends: int = 0
    ) -> None:
        self._pending, self._steps, self._sends = named_handles, steps, sends
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        """True once all messages are here: :meth:`wait` will not sleep, but may still have to decode and add."""
        self.advance(block=False)
        return not self._sends and self._has_arrived()

    def wait(self, awaited: str = "") -> torch.Tensor:
        """The result; asleep until all messages are here. A second call returns the same tensor.

        Args:
            awaited: in words what is waited for, for the line that says so when it does not come.

        Raises:
            horovod.common.exceptions.HorovodInternalError: another rank is gone.
        """
        self.advance(True, awaited)
        if self._steps:
            self._run_steps(awaited)
        if self._result is None:
            raise RuntimeError("this collective has failed before; start the step again")
        return self._result

    def advance(self, block: bool, awaited: str = "") -> None:
        """Sends what follows on messages that are here, or with ``block`` waits for these."""
        while self._sends and (block or self._has_arrived()):
            self._run_steps(awaited)

    def then(self, step: Callable[[torch.Tensor], Any], sends: bool = False) -> Work:
        """This work with one more step; wait for the new one instead."""
        return Work(self._pending, *self._steps, step, sends=self._sends + sends)

    def forget(self) -> None:
        """Drops what is not waited for; it completes by itself."""
        for _, handle in self._pending:
            mpi_ops._handle_map.pop(handle, None)  # what Horovod keeps until somebody waits
        self._pending, self._steps, self._sends = (), (), 0

    def _has_arrived(self) -> bool:
        return all(mpi_ops.poll(handle) for _, handle in self._pending)

    def _run_steps(self, awaited: str) -> None:
        """Waits for the messages and runs the steps, up to one that sends."""
        # Given up first: if one fails, Horovod has dropped the handle, and a second call must raise instead of going without a
        # result. And a step sends once, whatever becomes of it.
        pending, self._pending = self._pending, ()
        steps, self._steps = self._steps, ()
        sends, self._sends = self._sends, 0
        with torch.no_grad():
            result: Any = [wait(handle, name, awaited) for name, handle in pending]
            for number, step in enumerate(steps, start=1):
                result = step(result)
                if isinstance(result, Work):
                    self._pending, self._sends = result._pending, result._sends + sends - 1
                    self._steps = (*result._steps, *steps[number:])
                    return
        self._result = result


class Collectives:
    """The collectives of the ranks of a process set.

    All ranks must launch the same ones. A name (``what``) is the same on every rank, and free again once its work has been waited
    for. Until then nobody may change the tensors that are sent.

    Args:
        prefix: prefix of all names, unique to the owner of these collectives and the same on every rank.
    """

    def __init__(self, process_set: Any, prefix: str) -> None:
        self.process_set, self.prefix = process_set, prefix

    def rename(self, prefix: str) -> None:
        """Begins new names: after an abandoned step, tensors of the old ones may still be on their way."""
        self.prefix = prefix

    def allreduce(self, values: torch.Tensor, what: str, op: int = Sum) -> Work:
        """Starts to reduce some ``values`` (a small tensor), which stay as they are."""
        # Also where the set is :class:`.process_sets.Alone`, of which Horovod knows nothing.
        if self.process_set.size() == 1 or not values.numel():
            return Work((), lambda _: values)
        name = f"{self.prefix}.{what}.{values.numel()}"
        handle = mpi_ops.allreduce_async(values, name=name, op=op, process_set=self.process_set)
        return Work([(name, handle)], lambda results: results[0])

    def sum(self, values: torch.Tensor, what: str) -> Any:
        """The sum of each of some ``values`` (a small tensor) over the ranks, as (nested) lists."""
        return self.allreduce(values, what).wait().tolist()

    def maximum(self, values: torch.Tensor, what: str) -> Any:
        """The greatest of each of some ``values`` (a small tensor, no nan) over the ranks, as (nested) lists."""
        return self.allreduce(values, what, Max).wait().tolist()

    def objects(self, value: Any, what: str) -> list[Any]:
        """One picklable value of each rank, in rank order."""
        return allgather_objects(value, self.process_set, f"{self.prefix}.{what}")

    def allgather(self, rows: torch.Tensor, what: str) -> Work:
        """Starts to gather the ``rows`` [any, ...] of all ranks, in rank order; ranks may have different numbers of them."""
        name = f"{self.prefix}.{what}"
        handle = mpi_ops.allgather_async(rows, name, self.process_set)
        return Work([(name, handle)], lambda results: results[0])

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> Work:
        """Starts to give all ranks the values of the rank ``root`` of the job in a contiguous ``tensor``, in place; its result is
        ``tensor``.
        """

        def begin(part: torch.Tensor, name: str) -> Any:
            return mpi_ops.broadcast_async_(part, root, name, self.process_set)

        return Work(self._in_parts(tensor.view(1, -1), 1, what, begin), lambda _: tensor)

    def _in_parts(
        self, message: torch.Tensor, rows: int, what: str, begin: Callable[[torch.Tensor, str], Any]
    ) -> list[tuple[str, int]]:
        """Begins a collective of a message [any, m] that becomes ``rows`` rows; by columns where that is too much for one call."""
        # By columns, so that each message has the same part of every rank's row and equal splits.
        parts = torch.split(message, most_columns(rows, message.itemsize), dim=1)
        name = f"{self.prefix}.{what}"
        names = [name] if len(parts) == 1 else [f"{name}.{number}" for number in range(len(parts))]
        return [(own, begin(part, own)) for own, part in zip(names, parts)]


def most_columns(rows: int, itemsize: int) -> int:
    """The most columns of a message [rows, any] that Horovod can carry."""
    return max(min(LARGEST // rows, LARGEST // itemsize), 1)


def ranks_of(process_set: Any) -> list[int]:
    """The ranks of a process set, in order."""
    return list(process_set.ranks or range(process_set.size()))
