"""Messages of tensors on GPUs, over PyTorch's NCCL: between the stages of a replica, and between the parts of a layer.

The host launches a message and continues. :mod:`.links` carries everything else, and everything where a job has no NCCL.

A message is a kernel on both GPUs, and each waits for the other. No two messages can wait for each other, since every kernel only
waits for kernels that some process has launched before it:

1. Each direction between two stages has a communicator and a stream. The sender announces each message over the host's link, and
   the receiver launches its receives in the order of the announcements (:mod:`hvd_ckpt.parallel.pipeline.transport`).
2. The parts of a layer launch their sums in the same order, which is that of the pass.
3. A stream of messages waits for the stream that computes, and never for another stream of messages.

So the messages of stages and the sums of parts need no order between them. They must fit on the GPU together, as must those of
Horovod. Therefore each has a fixed number of channels. Messages only move bytes. Sums are computed by the parts in a fixed order
(:mod:`.parts`), so their bits do not depend on the algorithm and the protocol that NCCL chooses.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.grid import Grid
from hvd_ckpt.processes.links import GRACE_SECONDS, NO_LIMIT, StageFailed, gloo_group, noticing_ends
from hvd_ckpt.processes.watchdog import Wait

MESSAGE_CHANNELS, SUM_CHANNELS = 4, 16  # multiprocessors of a message and of a sum
STILL_SECONDS = 2.0  # without a finished message, before the processes are looked at
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
SHARED_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class Request(NamedTuple):
    """A message: what a backend on the host waits with, or an event after it on a GPU, and the memory that it arrives in; nothing
    of an empty one, which is not sent."""

    work: Any = None
    event: Any = None
    received: Tensor | None = None


class DeviceLink:
    """Messages between processes that each have a GPU, with the methods of the links of :mod:`.links`, but for the order of tags.

    Args:
        grid: of this job, with its store.
        members: numbers of the processes that are connected.
        name: name of these in the store.

    Attributes:
        device: type of the device whose tensors the link carries.
        may_connect: whether no two members share a GPU, or NCCL may share it; None before :meth:`connect`.
    """

    def __init__(self, grid: Grid, members: Iterable[int], name: str) -> None:
        assert grid.store is not None
        self.device = "cuda" if grid.backend == "nccl" else "cpu"
        self._grid, self._members = grid, list(members)
        self._store = PrefixStore(name, grid.store)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._streams: dict[tuple[int, ...], Any] = {}
        self._launched: deque[tuple[Any, str]] = deque()  # an event after each message, and what it is
        self._since = 0.0  # when the last message was finished
        self._failure, self._has_raised = "", False
        self.may_connect: bool | None = None

    def connects(self, *direction: int) -> bool:
        """Whether :meth:`connect` has connected two processes in this direction; without arguments, all members."""
        return direction in self._groups

    def connect(self, *directions: tuple[int, ...]) -> None:
        """Connects processes in these directions, or all members in the direction ``()``. Collective over the members.

        Several members on one GPU stay unconnected, unless NCCL is told to allow that.
        """
        if self.may_connect is None:
            self.may_connect = self._have_own_devices()
        for direction in directions:
            ranks = direction or self._members
            if not self.may_connect or direction in self._groups or self._grid.number not in ranks:
                continue
            others = [other for other in ranks if other != self._grid.number]
            # The first message makes the communicator, for which hosts wait for each other, so here all come in the same order.
            with (
                watchdog.waiting(f"{self._grid.name(others[0])} to connect"),
                noticing_ends(self._grid.name(others[0])),
            ):
                self._groups[direction] = self._group(direction, ranks)
                with self.memory_from(*direction[:1]):
                    rows = [torch.zeros(1, dtype=torch.uint8, device=self.device) for _ in ranks]
                if not direction:
                    self.exchange(rows, [row.clone() for row in rows])
                    continue
                start = self.send if direction[0] == self._grid.number else self.receive
                self.wait(start(rows[0], others[0]), f"{self._grid.name(others[0])} to connect", others[0])

    def memory_from(self, *source: int) -> AbstractContextManager[Any]:
        """A context in which memory for a message from this process is allocated, so that its receive waits for nothing else."""
        stream = self._streams.get((*source, self._grid.number))
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    def send(self, memory: Tensor, to: int, tag: int = 0) -> Request:
        """Starts to send bytes, which must stay as they are until :meth:`is_sent` or :meth:`wait`."""
        return self._start(
            "send", memory, (self._grid.number, to), f"{self._grid.name(to)} to take what was sent"
        )

    def receive(self, memory: Tensor, source: int, tag: int = 0) -> Request:
        """Starts to receive bytes into memory of :meth:`memory_from`."""
        return self._start(
            "recv", memory, (source, self._grid.number), f"values of {self._grid.name(source)}"
        )

    def _start(self, operation: str, memory: Tensor, direction: tuple[int, int], awaited: str) -> Request:
        self._raise_failure()
        if not memory.numel():
            return Request()
        sends = operation == "send"
        other = direction[sends]
        launch = getattr(self._groups[direction], operation)
        with noticing_ends(self._grid.name(other)):
            if not memory.is_cuda:
                return Request(launch([memory], int(sends), 0))
            stream = self._streams[direction]
            if sends:
                stream.wait_stream(torch.cuda.current_stream())  # which computes what is sent
            with torch.cuda.stream(stream):
                # NCCL's own stream begins after this one, which then waits for it.
                launch([memory], int(sends), 0).wait()
                event = stream.record_event()
        self._launched.append((event, awaited))
        return Request(None, event, None if sends else memory)

    def is_sent(self, request: Request) -> bool:
        """Whether it is known to be sent, without a wait."""
        return request.work is None and (request.event is None or bool(request.event.query()))

    def wait(self, request: Request, awaited: str, other: int) -> None:
        """Has the current stream wait for a message; without a GPU, the host.

        Raises:
            StageFailed: another member has ended.
        """
        self._raise_failure()
        if request.event is None:
            with watchdog.waiting(awaited), noticing_ends(self._grid.name(other)):
                if request.work is not None:
                    request.work.wait()
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(request.event)
        if request.received is not None:  # allocated on another stream
            request.received.record_stream(stream)

    def exchange(self, sent: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Sends ``sent[r]`` to each other member r, and receives ``rows[r]`` from it, as bytes. Collective over the members."""
        self._raise_failure()
        group, position = self._groups[()], self._members.index(self._grid.number)
        works = []
        if group.supports_coalescing:  # one kernel sends and receives
            group._start_coalescing()
        for rank, other in enumerate(self._members):
            with noticing_ends(self._grid.name(other)):
                if rank != position and rows[rank].numel():
                    works.append((group.recv([rows[rank]], rank, 0), other))
                if rank != position and sent[rank].numel():
                    works.append((group.send([sent[rank]], rank, 0), other))
        if group.supports_coalescing:
            work = group._end_coalescing()
            works = [(work, other) for _, other in works[:1]]
        for work, other in works:
            awaited = f"values of {self._grid.name(other)}"
            if not rows[0].is_cuda:
                self.wait(Request(work), awaited, other)
                continue
            work.wait()  # the current stream does, and all that it computes and frees comes after it
            self._launched.append((torch.cuda.current_stream().record_event(), awaited))

    def _group(self, direction: tuple[int, ...], ranks: Sequence[int]) -> Any:
        name = "-".join(map(str, direction)) or "all"
        store, rank = PrefixStore(name, self._store), ranks.index(self._grid.number)
        if self._grid.backend == "gloo":
            return gloo_group(store, rank, len(ranks), self._grid.address)
        group: Any = distributed.ProcessGroupNCCL
        options = group.Options()
        options._timeout = NO_LIMIT
        options.config.min_ctas = options.config.max_ctas = MESSAGE_CHANNELS if direction else SUM_CHANNELS
        if direction:
            self._streams[direction] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return group(store, rank, len(ranks), options)

    def _have_own_devices(self) -> bool:
        if self._grid.backend != "nccl" or os.environ.get(SHARED_VARIABLE) == "1":
            return True
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._store.set(str(self._grid.number), str(device.uuid))
        with watchdog.waiting("the GPUs of the other stages and parts"):
            return len({self._store.get(str(member)) for member in self._members}) == len(self._members)

    # ------------------------------------------------------------------------------------------------ failures

    def look(self) -> Wait | None:
        """Each second, on the watchdog's thread: what has been waited for since when, as the host may wait for a GPU's kernel.

        If a member of this host has ended, its messages are aborted. NCCL notices one of another host, and PyTorch then ends this
        process.
        """
        now = watchdog.now()
        if self._failure:
            # What the aborted kernels have left is of no use, and something must be told that.
            if not self._has_raised and now - self._since > STILL_SECONDS + GRACE_SECONDS:
                watchdog.end(self._failure)
            return None
        before = len(self._launched)
        while self._launched and self._launched[0][0].query():
            self._launched.popleft()
        if not self._launched:
            self._since = 0.0
            return None
        if not self._since or len(self._launched) < before:
            self._since = now
        if now - self._since > STILL_SECONDS:
            peers = self._grid.peers
            for member in self._members:
                if peers[member].shares_table(peers[self._grid.number]) and peers[member].has_ended():
                    self._abort(f"{self._grid.name(member)} has ended")
                    return None
        return Wait(self._since, self._launched[0][1])

    def _abort(self, reason: str) -> None:
        self._failure = reason
        for group in self._groups.values():
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _raise_failure(self) -> None:
        if self._failure:
            self._has_raised = True
            raise StageFailed(self._failure)


def add_links(grid: Grid) -> None:
    """Gives a grid the links of its GPUs, if all processes of the job have the backend for them."""
    watchdog.look_every_second()
    if grid.store is None:
        return
    # A stream that waits at the head of a hardware queue would hold up another one behind it.
    os.environ.setdefault(QUEUES_VARIABLE, "32")
    if grid.stages > 1:
        members = [grid.process(stage) for stage in range(grid.stages)]
        grid.stage_link = DeviceLink(grid, members, f"stages of replica {grid.replica}, part {grid.part}")
    if grid.tensor > 1:
        members = [grid.process(grid.stage, part=part) for part in range(grid.tensor)]
        grid.part_link = DeviceLink(grid, members, f"parts of stage {grid.stage}, replica {grid.replica}")
    watchdog.look_every_second(*(link.look for link in (grid.stage_link, grid.part_link) if link is not None))
