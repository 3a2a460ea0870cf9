"""What is launched to begin with, and what when that has died: from which snapshot it goes on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.snapshots.folder import SNAPSHOT, step_of

__all__ = ["Commands", "newest_but", "next_settings", "origin", "snapshots_of", "start_of"]


@dataclass(frozen=True)
class Commands:
    """What is launched.

    Attributes:
        launcher: that starts the ranks, with its arguments; empty for one process.
        first: the settings of ``hvd-ckpt train`` to begin with.
        again: the settings to go on with, once ``run`` holds something to go on from; they have ``--resume=`` and ``run``, in whose
            place that of a snapshot may be put.
        run: folder of the run.
        resumed: whether the run was there before; else its folder is new and empty.
    """

    launcher: Sequence[str]
    first: Sequence[str]
    again: Sequence[str]
    run: Path
    resumed: bool


def next_settings(commands: Commands, new: Path | None) -> Sequence[str]:
    """The settings of the next launch. What a run left that died before it was under way is removed from its new folder."""
    if commands.resumed:
        if new is None:
            return commands.first
        start = origin(commands, new)
        return [
            f"--resume={start}" if word == f"--resume={commands.run}" else word for word in commands.again
        ]
    if (commands.run / "config.yaml").exists():
        return commands.again
    for path in commands.run.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return commands.first


def origin(commands: Commands, new: Path | None) -> Path:
    """The run or snapshot to go on from: the run, unless that has later snapshots, not of this job, that were to be removed.

    Args:
        new: the newest snapshot that this job has written.
    """
    if not commands.resumed:
        return commands.run
    if new is None:
        given = [word.removeprefix("--resume=") for word in commands.first if word.startswith("--resume=")]
        return Path(given[-1]).resolve() if given else commands.run
    return commands.run if _newest(commands.run) == new else new


def start_of(origin: Path) -> str:
    """In words, for a run or snapshot to go on from."""
    found = origin if (origin / "manifest.json").is_file() else _newest(origin)
    return "from the beginning" if found is None else f"from step {step_of(found)}"


def _newest(run: Path) -> Path | None:
    from hvd_ckpt.snapshots.reader import SnapshotError, newest

    with contextlib.suppress(SnapshotError):
        return newest(run / "snapshots")
    return None


def snapshots_of(run: Path) -> set[tuple[Path, int]]:
    """The snapshots that a run has in place, with the times at which they were written."""
    found = set()
    for path in (run / "snapshots").glob("step-*"):
        with contextlib.suppress(OSError):
            if SNAPSHOT.fullmatch(path.name):
                found.add((path, path.stat().st_mtime_ns))
    return found


def newest_but(run: Path, before: set[tuple[Path, int]]) -> Path | None:
    """The newest snapshot that was not there before; None if there is none."""
    return max((path for path, _ in snapshots_of(run) - before), key=step_of, default=None)
