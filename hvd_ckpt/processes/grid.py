"""The grid of a job with pipeline stages: which stage and which replica this process is, and what stages tell each other.

A job of np processes runs ``stages`` times ``replicas`` of them; the process number is ``stage * replicas + replica``, so the
replicas of a stage are close together. The replicas of each stage form a Horovod world of their own. Everything that talks to
Horovod (reducer, shards, broadcasts, ``rank()``, ``size()``) thus sees one data-parallel job per stage, over MPI and over Gloo.
How the processes find and reach each other is in :mod:`.links`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import Tensor

if TYPE_CHECKING:
    from hvd_ckpt.processes.hosts import Peer
    from hvd_ckpt.processes.links import GlooLink, MpiLink

GATHER_TAG, FAILURE_TAG = 0, 1  # of messages; a pipeline's values have tags from FIRST_TAG
FIRST_TAG = 2


@dataclass
class Grid:
    """Stages and replicas of this job, and this process's place among them.

    Attributes:
        stages, replicas: how many; np is their product.
        stage, replica: this process's, from 0.
        local_rank, local_size: its number among the processes of all stages on this host, and how many these are.
        peers: where each process of the job runs, by process number.
        link: messages between all processes; None in a job of one process that no launcher has started.
    """

    stages: int
    replicas: int
    stage: int
    replica: int
    local_rank: int = 0
    local_size: int = 1
    peers: Sequence[Peer] = ()
    link: MpiLink | GlooLink | None = None
    horovod: dict[str, Any] = field(
        default_factory=dict
    )  # arguments and environment that Horovod starts with

    @property
    def size(self) -> int:
        """Number of processes in the job."""
        return self.stages * self.replicas

    @property
    def number(self) -> int:
        """This process's number in the job; ``rank()`` where there are no stages."""
        return self.process(self.stage)

    def process(self, stage: int, replica: int | None = None) -> int:
        """The process number of a stage, by default that of this process's replica."""
        return stage * self.replicas + (self.replica if replica is None else replica)

    def name(self, process: int) -> str:
        """A process in words: ``stage 1 (rank 3 on host node7)``."""
        host = f" on host {self.peers[process].host}" if process < len(self.peers) else ""
        return f"stage {process // self.replicas} (rank {process}{host})"

    def gather(self, values: Tensor) -> list[Tensor]:
        """The values (float64, of one length on all stages) of every stage of this replica, in the order of the stages. Collective
        over the stages of a replica.

        Raises:
            StageFailed: another stage has ended by an error.
        """
        rows = [values if stage == self.stage else torch.empty_like(values) for stage in range(self.stages)]
        requests = []
        for stage, row in enumerate(rows):
            if stage != self.stage:
                assert self.link is not None
                other = self.process(stage)
                memory = values.contiguous().view(torch.uint8)
                requests += [
                    (one, other) for one in self.link.receive(row.view(torch.uint8), other, GATHER_TAG)
                ]
                requests += [(one, other) for one in self.link.send(memory, other, GATHER_TAG)]
        for request, other in requests:
            assert self.link is not None
            self.link.wait(request, f"values of {self.name(other)}", other)
        return rows

    def on_any_stage(self, happened: bool) -> bool:
        """Whether something has happened on some stage of this replica. Collective over the stages of a replica."""
        if self.stages == 1:
            return happened
        own = torch.tensor([float(happened)], dtype=torch.float64)
        return any(bool(stage) for stage in self.gather(own))

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value of every stage of this replica, in the order of the stages. Collective over the stages of a replica."""
        content = pickle.dumps(value)
        sizes = [int(size) for size in self.gather(torch.tensor([len(content)], dtype=torch.float64))]
        padded = torch.zeros(-(-max(sizes) // 8), dtype=torch.float64)  # whose bytes are the content
        padded.view(torch.uint8)[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = [row.view(torch.uint8)[:size] for row, size in zip(self.gather(padded), sizes)]
        return [pickle.loads(row.numpy().tobytes()) for row in rows]


_grid: Grid | None = None


def current() -> Grid:
    """The grid of this job: that of ``hvd_ckpt.init(stages=...)``, or one stage with all ranks of Horovod."""
    if not hvd.is_initialized():  # or not any more
        return Grid(1, 1, 0, 0)
    return _grid or Grid(
        1, hvd.size(), 0, hvd.rank(), local_rank=hvd.local_rank(), local_size=hvd.local_size()
    )


def stage() -> int:
    """The pipeline stage of this process, from 0; ``rank()`` is its replica. 0 in a job without stages."""
    return current().stage


def stages() -> int:
    """The number of pipeline stages, as given to ``init(stages=...)``; ``size()`` is the number of replicas of each."""
    return current().stages


def set_current(grid: Grid | None) -> None:
    """Makes a grid that of this job; None: Horovod is to start without stages."""
    global _grid
    _grid = grid
