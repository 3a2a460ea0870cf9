"""The grid of a job: stage, replica, part and host of this process.

A job has ``stages`` times ``replicas`` times ``tensor`` processes. The process number is
``(stage * replicas + replica) * tensor + part``, so the parts of a layer are next to each other and the replicas of a stage are
close together. The replicas of each stage and part form a Horovod world. All code that uses
Horovod (reducer, shards, broadcasts, ``rank()``, ``size()``) thus sees one data-parallel job, over MPI and over Gloo.
:mod:`.links` connects the processes, and has the messages between stages and parts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_ckpt.processes.launchers import is_elastic

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hvd_ckpt.processes.device_link import DeviceLink
    from hvd_ckpt.processes.hosts import Peer
    from hvd_ckpt.processes.links import GlooLink, MpiLink

GATHER_TAG, FAILURE_TAG = 0, 1  # of messages; a pipeline's values have tags from FIRST_TAG
FIRST_TAG = 2


@dataclass
class Grid:
    """Stages, replicas and parts of this job, and this process's place among them.

    Attributes:
        stages, replicas, tensor: how many stages, replicas of a stage and parts of a layer; np is their product.
        stage, replica, part: this process's, from 0.
        local_rank, local_size: its number among the processes of all stages on this host, and how many these are.
        peers: where each process of the job runs, by process number.
        link: messages between all processes, where there are several stages or parts.
        alone: this process measures by itself, see :func:`.parts.alone`.
        stage_link, part_link: messages of devices between the stages of a replica, and the parts of a layer.
        backend: of PyTorch, which all processes have for messages of their device's tensors; an empty string if they have none.
        store, address: for such groups, where there is a backend, and where this process listens.
    """

    stages: int
    replicas: int
    stage: int
    replica: int
    local_rank: int = 0
    local_size: int = 1
    tensor: int = 1
    part: int = 0
    peers: Sequence[Peer] = ()
    alone: bool = False
    link: MpiLink | GlooLink | None = None
    stage_link: DeviceLink | None = None
    part_link: DeviceLink | None = None
    backend: str = ""
    store: Store | None = None
    address: str = ""

    @property
    def size(self) -> int:
        """Number of processes in the job."""
        return self.stages * self.replicas * self.tensor

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that one replica of the model is spread over: its stages times their parts."""
        return self.stages * self.tensor

    @property
    def number(self) -> int:
        """This process's number in the job; ``rank()`` where there are neither stages nor parts."""
        return self.process(self.stage)

    def process(self, stage: int, replica: int | None = None, part: int | None = None) -> int:
        """The process number of a stage, by default that of this process's replica and part."""
        row = stage * self.replicas + (self.replica if replica is None else replica)
        return row * self.tensor + (self.part if part is None else part)

    def name(self, process: int) -> str:
        """A process in words: ``stage 1 (rank 3 on host node7)``, ``part 0 (rank 2)``, ``stage 1, part 0 (rank 6)``."""
        host = f" on host {self.peers[process].host}" if process < len(self.peers) else ""
        row, part = divmod(process, self.tensor)
        words = [f"stage {row // self.replicas}"] if self.stages > 1 or self.tensor == 1 else []
        words += [f"part {part}"] if self.tensor > 1 else []
        return f"{', '.join(words)} (rank {process}{host})"

    # Messages between processes of a job. A process without links is the only one, or measures as if it were.

    def gather(self, values: Tensor, stages: bool = True, parts: bool = True) -> list[Tensor]:
        """The values (of one dtype and length everywhere) of every stage and part of this replica, ordered by stage, then part.
        Collective over these.

        Args:
            stages, parts: False for the values of this stage or part alone.

        Raises:
            StageFailed: another stage or part has ended by an error.
        """
        if self.link is None:
            return [values]
        others = [
            self.process(stage, part=part)
            for stage in (range(self.stages) if stages else [self.stage])
            for part in (range(self.tensor) if parts else [self.part])
        ]
        rows = [values if other == self.number else torch.empty_like(values) for other in others]
        received = {other: row.view(torch.uint8) for other, row in zip(others, rows) if other != self.number}
        self.exchange(dict.fromkeys(received, values.contiguous().view(torch.uint8)), received, GATHER_TAG)
        return rows

    def gather_objects(self, value: Any, stages: bool = True, parts: bool = True) -> list[Any]:
        """The same for a picklable value."""
        if self.link is None:
            return [value]
        # gather() carries values of one length: first the sizes, then the pickles, padded to the largest one.
        content = pickle.dumps(value)
        sizes = [int(size) for size in self.gather(torch.tensor([len(content)]), stages, parts)]
        padded = torch.frombuffer(bytearray(content.ljust(max(sizes))), dtype=torch.uint8)
        return [pickle.loads(row.numpy().tobytes()) for row in self.gather(padded, stages, parts)]

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int) -> None:
        """Sends bytes to other processes, which receive as many from this one, by their numbers. Collective over them.

        Raises:
            StageFailed: another process has ended by an error.
        """
        # Everything is started before anything is waited for. All members run the same lines, so none can wait for another to
        # send. Receives come first: what arrives has its place then.
        link: Any = self.link
        requests = [(link.receive(memory, other, tag), other) for other, memory in received.items()]
        requests += [(link.send(memory, other, tag), other) for other, memory in sent.items()]
        for request, other in requests:
            link.wait(request, f"values of {self.name(other)}", other)

    def on_any_stage(self, happened: bool) -> bool:
        """Whether something has happened on some stage or part of this replica. Collective over these."""
        return any(bool(stage) for stage in self.gather(torch.tensor([bool(happened)])))

    def of_all(self, replicas: list[Any]) -> list[Any]:
        """The values of all processes, by process number, from those of the replicas of each stage and part. Collective over the
        stages and parts of a replica.
        """
        # Two stages with two replicas each have processes 0 to 3:
        #
        #   replicas   on 0 and 1: [v0, v1]         on 2 and 3: [v2, v3]
        #   worlds     on all:     [[v0, v1], [v2, v3]]
        worlds = self.gather_objects(replicas)
        return [
            world[replica]
            for start in range(0, len(worlds), self.tensor)
            for replica in range(len(replicas))
            for world in worlds[start : start + self.tensor]
        ]


_grid: Grid | None = None
_pretended: Grid | None = None


def current() -> Grid:
    """The grid of this job, or within :func:`pretending` the one that is given there."""
    return of_job() if _pretended is None else _pretended


def of_job() -> Grid:
    """The grid of this job: that of ``hvd_ckpt.init(stages=...)``, or one stage with all ranks of Horovod."""
    if not hvd.is_initialized():  # or not any more
        return Grid(1, 1, 0, 0)
    return _grid or Grid(
        1, hvd.size(), 0, hvd.rank(), local_rank=hvd.local_rank(), local_size=hvd.local_size()
    )


@contextlib.contextmanager
def pretending(grid: Grid) -> Iterator[None]:
    """Inside, :func:`current` is this grid, of which no other process exists."""
    global _pretended
    before, _pretended = _pretended, grid
    try:
        yield
    finally:
        _pretended = before


def require_initialized(call: str) -> None:
    """Raises the error of ``call`` if Horovod does not run: a ``ValueError``, as Horovod's own, that names the ``init`` to call."""
    if not hvd.is_initialized():
        raise ValueError(f"{call}: Horovod is not initialized; call hc.init() first (import hvd_ckpt as hc)")


def _fact(name: str) -> Callable[[], int]:
    function = getattr(hvd, name)

    @functools.wraps(function)
    def fact() -> int:
        require_initialized(f"{name}()")
        return int(function())

    return fact


rank, size, local_rank, local_size, cross_rank, cross_size = map(
    _fact, ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
)
"""Horovod's functions, whose error names the ``init`` of this library. They are asked first in most scripts."""


def grid() -> Grid:
    """The place of this process in the job of ``init(stages=..., tensor=...)``: ``stages`` and ``stage``, ``replicas`` and
    ``replica``, ``tensor`` (parts of a layer) and ``part``. ``rank()`` is the replica, and ``size()`` the number of replicas."""
    return current()


def host_name() -> str:
    """This machine's name: as the launcher was given it, where that says which machine it is."""
    launched = os.environ.get("HOROVOD_HOSTNAME", "")
    return launched if launched not in ("", "localhost", "127.0.0.1") else socket.gethostname()


def features_of_job() -> dict[str, Any]:
    """What this job itself gives to the rules (:mod:`hvd_ckpt.utils.rules`)."""
    from hvd_ckpt.utils.rules import ELASTIC

    grid = current()
    return {
        "stages": grid.stages if grid.stages > 1 else None,
        "tensor": grid.tensor if grid.tensor > 1 else None,
        ELASTIC: is_elastic(),
    }


def set_current(grid: Grid | None) -> None:
    """Makes a grid that of this job; None: Horovod is to start without stages."""
    global _grid
    _grid = grid
