"""Errors and places that all ranks of a run have in common."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.folders import new_folder
from hvd_ckpt.reduction.agreement import FailedElsewhere, broadcast_from, raise_together
from hvd_ckpt.snapshots.reader import SnapshotError, find
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.stopping import forget_file

__all__ = ["errors_everywhere", "run_folder"]


@contextlib.contextmanager
def errors_everywhere(name: str) -> Iterator[None]:
    """What one rank raises inside, all ranks raise. The body must not communicate, since a rank may leave it early.

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


def run_folder(config: Config) -> tuple[Path, Path | None]:
    """The run's folder and the snapshot to start from, as rank 0 finds them; None where there is none yet. Collective.

    Raises:
        ConfigError: the folder is in use or cannot be written to, or has no snapshot to go on from; on every rank.
    """
    answer: tuple[Path, Path | None] | str = ""
    if hvd.rank() == 0:
        try:
            answer = (
                _resumed(Path(config.resume))
                if config.resume
                else (new_folder(config.output, "train", make=not config.dry_run), None)
            )
            if not config.dry_run:
                forget_file(answer[0])
        except ValueError as error:
            answer = f"resume: {error}" if config.resume else f"output: {error}"
    answer = broadcast_from(answer, 0, global_process_set, "hvd_ckpt.train.folder")
    if isinstance(answer, str):
        raise ConfigError(answer)
    return answer


def _resumed(path: Path) -> tuple[Path, Path | None]:
    if (path / "manifest.json").is_file():
        path = path.resolve()
        if path.parent.name != "snapshots":
            raise ValueError(
                f"'{path}' is not in the folder 'snapshots' of a run: put it there, with the run's config.yaml"
            )
        return path.parent.parent, path
    found = find(path / "snapshots")
    if found is None and not (path / "config.yaml").is_file():
        raise ValueError(f"there is no snapshot in '{path}': give the folder of a run or of a snapshot")
    if found is None:
        warnings.warn(f"'{path}' has no snapshot yet: the run starts from its beginning.", stacklevel=1)
        return path.resolve(), None
    return path.resolve(), found.resolve()
