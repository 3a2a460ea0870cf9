"""Horovod over ranks that all have the same data as this process, inside of :func:`streams.simulated`.

On a device it works as it does with NCCL: where an operation is enqueued it records an event on the current stream, its own stream
waits for that, and its thread allocates results that have no memory yet on the default stream. Its own stream also waits for the
default stream as it is then, so that what used this memory before is over. An operation is done once its stream has done it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from horovod.torch import mpi_ops
from streams import Event, Simulation, Stream

THREAD = "Horovod's thread"


class AlikeRanks:
    """The ranks.

    Args:
        simulation: which this is part of.
        ranks: their number.
        looks: how often the host finds an operation not done yet.

    Attributes:
        process_set: of all of them.
    """

    def __init__(self, simulation: Simulation, ranks: int = 2, looks: int = 0) -> None:
        self._simulation, self._ranks, self._looks = simulation, ranks, looks
        self._looked: Counter[int] = Counter()
        self._stream = Stream(simulation, "NCCL's stream")
        self._pending: dict[int, tuple[Any, Any, Event]] = {}
        self._handles = itertools.count(1 << 20)
        self.process_set: Any = SimpleNamespace(
            size=lambda: ranks, rank=lambda: 0, included=lambda: True, process_set_id=0, ranks=[*range(ranks)]
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[AlikeRanks]:
        """Within it ``hvd_ckpt`` finds these ranks."""
        replacements: dict[str, Any] = {
            "allreduce_async": self._allreduce,
            "allreduce_async_": self._allreduce_in_place,
            "allgather_async": self._allgather,
            "_allgather_async": self._allgather_into,
            "alltoall_async": self._alltoall,
            "poll": self._poll,
            "synchronize": self._synchronize,
        }
        with (
            mock.patch.multiple(mpi_ops, **replacements),
            mock.patch("hvd_ckpt.collectives.exchange.controller", return_value="gloo"),
            mock.patch("hvd_ckpt.collectives.agreement.allgather_objects", self._allgather_objects),
            mock.patch("hvd_ckpt.collectives.asynchronous.allgather_objects", self._allgather_objects),
        ):
            yield self

    def _allgather_objects(self, value: Any, *_: Any) -> list[Any]:
        return [value] * self._ranks

    def _start(self, operation: Callable[[], Any], *held: torch.Tensor) -> int:
        handle, simulation = next(self._handles), self._simulation
        enqueued = simulation.stream.record_event()
        with simulation.thread(THREAD):
            if simulation.is_on_device(held[0]):
                self._stream.wait_event(enqueued)
                self._stream.wait_event(simulation.default.record_event())
                with torch.no_grad(), simulation.on(self._stream, simulation.default):
                    result = operation()
                done = self._stream.record_event()
            else:
                result, done = operation(), Event(simulation)
                done.clock = dict(simulation.clock(THREAD))
        self._pending[handle] = held, result, done
        return handle

    def _poll(self, handle: int) -> bool:
        self._looked[handle] += 1
        if self._looked[handle] <= self._looks:
            return False
        self._simulation.join(self._simulation.host, self._pending[handle][2].clock)
        return True

    def _synchronize(self, handle: int) -> Any:
        _, result, done = self._pending.pop(handle)
        self._simulation.join(self._simulation.host, done.clock)
        return result

    def _allreduce_in_place(
        self, tensor: torch.Tensor, name: str = "", op: Any = None, **options: Any
    ) -> int:
        factor = options.get("prescale_factor", 1.0) * options.get("postscale_factor", 1.0)
        factor *= self._ranks if op == mpi_ops.Sum else 1
        tensor = tensor.detach()
        return self._start(lambda: tensor.mul_(int(factor) if factor == int(factor) else factor), tensor)

    def _allreduce(self, tensor: torch.Tensor, **options: Any) -> int:
        return self._allreduce_in_place(tensor.clone(), **options)

    def _allgather(self, tensor: torch.Tensor, name: str = "", process_set: Any = None) -> int:
        return self._start(lambda: torch.cat([tensor] * self._ranks), tensor)

    def _allgather_into(self, tensor: torch.Tensor, output: torch.Tensor, name: str, process_set: Any) -> int:
        def fill() -> torch.Tensor:
            for part in output.view(self._ranks, -1):
                if part.data_ptr() != tensor.data_ptr():
                    part.copy_(tensor.view(-1))
            return output

        return self._start(fill, tensor, output)

    def _alltoall(
        self, tensor: torch.Tensor, splits: torch.Tensor, name: str = "", process_set: Any = None
    ) -> int:
        row = tensor[: int(splits[0])]
        return self._start(lambda: (torch.cat([row] * self._ranks), splits), tensor)
