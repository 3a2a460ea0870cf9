"""The save test: starts the process that saves and is killed within, and takes down what each kill has left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.probe import launcher_environment

__all__ = ["SaveError", "SaveKill", "save_kills"]

SAVER = "hvd_ckpt.bench.faults.saver"


class SaveError(Exception):
    """The process that saves did not come to its end; the message says why in one line."""


@dataclass(frozen=True)
class SaveKill:
    """One kill within a save.

    Attributes:
        seed, number: of the series, and of the kill within it.
        writer: ``blocking`` (``snapshot.write`` and ``snapshot.prune``) or ``background`` (``SnapshotWriter``).
        phase: how far the save had come, one of :data:`hvd_ckpt.bench.faults.saver.PHASES`.
        delay: seconds from the start of the save to the kill.
        write: the number of the write that was killed.
        found: that of the write whose snapshot is the newest good one.
        fault: what is wrong with it, in one line.
    """

    seed: int
    number: int
    writer: str
    phase: str
    delay: float
    write: int
    found: int
    fault: str | None

    @property
    def sound(self) -> bool:
        """Whether the newest good snapshot is what it should be."""
        return self.fault is None


def save_kills(folder: Path, saves: int, seed: int, each: Callable[[SaveKill], None]) -> None:
    """Kills a process ``saves`` times within its saves; ``each`` gets the outcome of every kill at once.

    Args:
        folder: for the snapshots; made here.

    Raises:
        SaveError: fewer kills could be done.
    """
    folder.mkdir(parents=True)
    log_file = folder.with_suffix(".log")
    done = 0
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", SAVER, str(folder), str(saves), str(seed)],
            env={**launcher_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                each(SaveKill(seed, done, **json.loads(line)))
                done += 1
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or done != saves:
        told = log_file.read_text(errors="replace").splitlines() or [f"status {status}"]
        raise SaveError(f"the save test ended after {done} of {saves} kills: {told[-1]} (log: {log_file})")
