"""Where a run starts: at its beginning, from a snapshot on the disk, or from a commit, which is a snapshot in memory.

A commit is what all ranks have in common of a snapshot (:mod:`hvd_ckpt.snapshots.snapshot`), copied, so that training may go on and
be taken back to it. Any rank may become the one that the others get it from, so every rank keeps one.
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
from hvd_ckpt.snapshots import snapshot
from hvd_ckpt.snapshots.snapshot import Snapshot
from hvd_ckpt.snapshots.staging import Copying, Staging
from hvd_ckpt.snapshots.tree import decode, encode

__all__ = ["Commit", "CommitMemory", "Origin", "broadcast_origin"]


@dataclass(frozen=True)
class Commit:
    """The state of a run after a step, in memory.

    Attributes:
        step: steps taken.
        weights, common: documents of :func:`hvd_ckpt.snapshots.tree.encode`.
        tensors: the tensors of both, on the CPU; nobody changes them.
    """

    step: int
    weights: Any
    common: Any
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]]

    def snapshot(self) -> Snapshot:
        """The commit as a run that goes on takes it: without what was a rank's own, since ranks have changed."""
        weights, common = self.tensors
        own = {name: tensor.clone() for name, tensor in common.items()}  # an optimizer keeps what it is given
        return Snapshot(
            self.step, hvd.size(), decode(self.weights, weights), decode(self.common, own), None, None
        )


@dataclass(frozen=True)
class Origin:
    """Where a run starts.

    Attributes:
        folder: of the run.
        start: a snapshot to start from, if there is no commit; None for the beginning.
        commit: to start from.
    """

    folder: Path
    start: Path | None = None
    commit: Commit | None = None

    def read(self) -> Snapshot | None:
        """What to start from; None for the beginning.

        Raises:
            SnapshotError: the snapshot cannot be used.
        """
        if self.commit is not None:
            return self.commit.snapshot()
        return None if self.start is None else snapshot.read(self.start, hvd.rank())


class CommitMemory:
    """Takes commits, each into the memory of the one before."""

    def __init__(self) -> None:
        self._staging = Staging()

    def take(self, step: int, weights: Mapping[str, Tensor], common: Any) -> Commit:
        """A copy of the state; the commit before is lost.

        Raises:
            Wrong: there is no memory for it.
        """
        documents, sources, names = [], [], []
        for value, called in ((dict(weights), "weights"), (common, "common")):
            document, tensors = encode(value, called)
            documents.append(document)
            names.append(list(tensors))
            sources += [tensor.detach() for tensor in tensors.values()]
        copies = self._staging.copies_of(sources)
        Copying(list(zip(sources, copies)), []).run()
        ready = iter(copies)
        of_weights, of_common = ({name: next(ready) for name in some} for some in names)
        return Commit(step, documents[0], documents[1], (of_weights, of_common))


def broadcast_origin(origin: Origin | None) -> Origin | None:
    """Rank 0's, on every rank. Collective."""
    commit = origin.commit if origin is not None else None
    layout = [] if commit is None else [_layout(tensors) for tensors in commit.tensors]
    plain = None if commit is None else (commit.step, commit.weights, commit.common)
    place = None if origin is None else (origin.folder, origin.start)
    place, plain, layout = broadcast_from(
        (place, plain, layout), 0, global_process_set, "hvd_ckpt.elastic.origin"
    )
    if place is None:
        return None
    folder, start = place
    if plain is None:
        return Origin(folder, start)
    if commit is None or hvd.rank() != 0:
        step, weights, common = plain
        received = [
            {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in tensors} for tensors in layout
        ]
        commit = Commit(step, weights, common, (received[0], received[1]))
    _broadcast_tensors([tensor for tensors in commit.tensors for tensor in tensors.values()])
    return Origin(folder, start, commit)


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _broadcast_tensors(tensors: list[Tensor]) -> None:
    """Rank 0's content, as bytes: Horovod knows few types of numbers."""
    handles = []
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            name = f"hvd_ckpt.elastic.tensor.{position}"
            handles.append((mpi_ops.broadcast_async_(flat, 0, name=name), name))
    for handle, name in handles:
        wait(handle, name)
