"""Decisions that all ranks of a run share: errors, its folder, and where it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set
from torch import Tensor

from hvd_ckpt.folders import new_folder
from hvd_ckpt.reduction.agreement import FailedElsewhere, broadcast_from, raise_together
from hvd_ckpt.snapshots.reader import Snapshot, SnapshotError, find, read
from hvd_ckpt.snapshots.tensors import map_tensors
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.stopping import forget_file

__all__ = ["ResumePoint", "errors_everywhere", "find_resume_point"]


@contextlib.contextmanager
def errors_everywhere(name: str) -> Iterator[None]:
    """An error that one rank raises inside is raised on all ranks. The body must not communicate, since a rank may leave it early.

    Raises:
        ConfigError: a ValueError inside, on this rank or another.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        raise_together(error, global_process_set, name)
    except ValueError as found:
        passing = isinstance(found, (FailedElsewhere, SnapshotError)) or getattr(found, "passing", False)
        raise ConfigError(str(found), passing) from None


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Attributes:
        folder: of the run.
        snapshot: on the disk, to resume from; None for the beginning.
        commit: a snapshot in memory, to resume from instead.
    """

    folder: Path
    snapshot: Path | None = None
    commit: Snapshot | None = None

    def read(self) -> Snapshot | None:
        """The state to resume from; None for the beginning.

        Raises:
            SnapshotError: the snapshot cannot be used.
        """
        if self.commit is not None:  # an optimizer keeps the tensors that it loads
            own = map_tensors(self.commit.replicated, "state", _clone)
            return dataclasses.replace(self.commit, ranks=hvd.size(), replicated=own)
        return None if self.snapshot is None else read(self.snapshot, hvd.rank())


def _clone(tensor: Tensor, place: str) -> Tensor:
    return tensor.clone()


def find_resume_point(config: Config) -> ResumePoint:
    """The run's folder and the snapshot to resume from, as rank 0 finds them. Collective.

    Raises:
        ConfigError: the folder is in use or cannot be written to, or has no snapshot to resume from; on every rank.
    """
    answer: ResumePoint | str = ""
    if hvd.rank() == 0:
        try:
            if config.resume:
                answer = _resumed(Path(config.resume))
            else:
                answer = ResumePoint(new_folder(config.output, "train", make=not config.dry_run))
            if not config.dry_run:
                forget_file(answer.folder)
        except ValueError as error:
            answer = f"resume: {error}" if config.resume else f"output: {error}"
    answer = broadcast_from(answer, 0, global_process_set, "hvd_ckpt.train.folder")
    if isinstance(answer, str):
        raise ConfigError(answer)
    return answer


def _resumed(path: Path) -> ResumePoint:
    if (path / "manifest.json").is_file():
        path = path.resolve()
        if path.parent.name != "snapshots":
            raise ValueError(
                f"'{path}' is not in the folder 'snapshots' of a run: put it there, with the run's config.yaml"
            )
        return ResumePoint(path.parent.parent, path)
    found = find(path / "snapshots")
    if found is None and not (path / "config.yaml").is_file():
        raise ValueError(f"there is no snapshot in '{path}': give the folder of a run or of a snapshot")
    if found is None:
        warnings.warn(f"'{path}' has no snapshot yet: the run starts from its beginning.", stacklevel=1)
        return ResumePoint(path.resolve())
    return ResumePoint(path.resolve(), found.resolve())
