"""Where a run starts: at its beginning, from a snapshot on the disk, or from a checkpoint of its state in memory.

A memory checkpoint is a copy of the weights and the replicated state, for a job whose ranks come and go: training continues, and
can be taken back to it. Any rank may become the one that broadcasts it, so every rank keeps one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import global_process_set
from torch import Tensor

from hvd_ckpt.reduction.agreement import broadcast_from
from hvd_ckpt.reduction.communicator import wait
from hvd_ckpt.snapshots.reader import Snapshot, read
from hvd_ckpt.snapshots.tensors import AsyncCopy, Staging, check_tensor, map_tensors

__all__ = ["MemoryCheckpoint", "ResumePoint", "broadcast_resume_point"]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """The state of a run after a step, in memory.

    Attributes:
        step: training steps taken.
        state: weights and replicated state, with tensors on the CPU that nobody changes.
    """

    step: int
    state: tuple[dict[str, Tensor], Any]

    @classmethod
    def take(
        cls, step: int, weights: Mapping[str, Tensor], replicated: Any, staging: Staging
    ) -> MemoryCheckpoint:
        """A copy of the state, into the memory of the checkpoint before.

        Raises:
            Wrong: there is no memory for it.
        """
        staging.restart()
        pairs: list[tuple[Tensor, Tensor]] = []

        def copied(tensor: Tensor, place: str) -> Tensor:
            check_tensor(tensor, place)
            pairs.append((tensor.detach(), staging.copy_of(tensor.detach())))
            return pairs[-1][1]

        state = map_tensors((dict(weights), replicated), "state", copied)
        AsyncCopy(pairs, []).run()
        return cls(step, state)

    def snapshot(self) -> Snapshot:
        """The checkpoint as a snapshot to resume from, without per-rank state, since ranks have changed."""
        weights, replicated = self.state
        own = map_tensors(
            replicated, "state", lambda tensor, _: tensor.clone()
        )  # an optimizer keeps what it loads
        return Snapshot(self.step, hvd.size(), weights, own, None, None)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        folder: of the run.
        start: a snapshot to resume from, if there is no memory checkpoint; None for the beginning.
        checkpoint: to resume from.
    """

    folder: Path
    start: Path | None = None
    checkpoint: MemoryCheckpoint | None = None

    def read(self) -> Snapshot | None:
        """The state to resume from; None for the beginning.

        Raises:
            SnapshotError: the snapshot cannot be used.
        """
        if self.checkpoint is not None:
            return self.checkpoint.snapshot()
        return None if self.start is None else read(self.start, hvd.rank())


def broadcast_resume_point(point: ResumePoint | None) -> ResumePoint | None:
    """Rank 0's, on every rank. Collective."""
    checkpoint = None if point is None else point.checkpoint
    outline = None
    if checkpoint is not None:
        outline = checkpoint.step, map_tensors(checkpoint.state, "state", lambda tensor, _: tensor.to("meta"))
    place = None if point is None else (point.folder, point.start)
    place, outline = broadcast_from((place, outline), 0, global_process_set, "hvd_ckpt.elastic.resume_point")
    if place is None or outline is None:
        return None if place is None else ResumePoint(*place)
    if checkpoint is None or hvd.rank() != 0:
        step, state = outline
        state = map_tensors(state, "state", lambda tensor, _: torch.empty_like(tensor, device="cpu"))
        checkpoint = MemoryCheckpoint(step, state)
    _broadcast_tensors(checkpoint.state)
    folder, start = place
    return ResumePoint(folder, start, checkpoint)


def _broadcast_tensors(state: Any) -> None:
    """Broadcasts rank 0's values, as bytes: Horovod knows few dtypes."""
    handles: list[tuple[Any, str]] = []

    def send(tensor: Tensor, _: str) -> Tensor:
        if tensor.numel():
            flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            name = f"hvd_ckpt.elastic.tensor.{len(handles)}"
            handles.append((mpi_ops.broadcast_async_(flat, 0, name=name), name))
        return tensor

    map_tensors(state, "state", send)
    for handle, name in handles:
        wait(handle, name)
