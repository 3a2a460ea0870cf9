"""``hvd-ckpt train`` under a launcher, as a job whose processes, log and snapshots are watched from outside."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from hvd_ckpt.bench.faults.drawing import ALL, LAUNCHER
from hvd_ckpt.bench.faults.processes import MARK, Process, end, marked, wait_until_gone
from hvd_ckpt.probe import launcher_environment

__all__ = ["RunView", "TrainJob", "logged_step", "newest_step"]

MPI_LAUNCHERS = ("mpirun", "orterun", "mpiexec", "prterun")
STEP_LINE = re.compile(r"\bstep +(\d+)/\d+ ")
STEP_RECORD = re.compile(rb'"step": (\d+), "kind": "train"')
TAIL = 4096  # bytes of a log that hold its last record


class TrainJob:
    """A job that runs from its making on; leaving the context ends what is left of it.

    Args:
        size: number of ranks.
        controller: ``gloo`` or ``mpi``.
        arguments: of ``hvd-ckpt train``.
        log_file: for all that it prints; written over.

    Attributes:
        process: the launcher.
        token: the mark of all its processes.
    """

    def __init__(self, size: int, controller: str, arguments: list[str], log_file: Path) -> None:
        self.log_file = log_file
        self.token = secrets.token_hex(8)
        launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(size), f"--{controller}"]
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "hvd_ckpt.cli.main", "train", *arguments],
                env={**launcher_environment(), "OMP_NUM_THREADS": "1", MARK: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> TrainJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self.token)
        self.process.wait()

    @property
    def ended(self) -> bool:
        """Whether the launcher has."""
        return self.process.poll() is not None

    def rank_processes(self) -> dict[int, Process]:
        """Of each rank its first process; ranks that have not started are not among them."""
        found: dict[int, Process] = {}
        for process in marked(self.token):
            if process.rank is not None:
                found.setdefault(process.rank, process)
        return found

    def launcher(self) -> int:
        """The process that has the ranks in its hands: ``mpirun``, where there is one, else the one that was started."""
        running = (process for process in marked(self.token) if process.name in MPI_LAUNCHERS)
        return next((process.pid for process in running), self.process.pid)

    def send(self, who: str, name: str, size: int) -> bool:
        """Sends the signal of that name to ``rank N``, ``all ranks`` or the ``launcher``; False while they are not all there."""
        if who == LAUNCHER:
            targets = [self.launcher()]
        else:
            ranks = self.rank_processes()
            wanted = range(size) if who == ALL else [int(who.removeprefix("rank "))]
            if any(rank not in ranks for rank in wanted):
                return False
            targets = [ranks[rank].pid for rank in wanted]
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])
        return True

    def left(self, limit: float) -> list[Process]:
        """Processes that are still there ``limit`` seconds after the launcher has ended; they are ended."""
        left = wait_until_gone(self.token, limit)
        end(self.token)
        return left

    def first_step(self) -> int | None:
        """The first step that it says it took."""
        found = STEP_LINE.search(self.log_file.read_text(errors="replace"))
        return int(found[1]) if found else None

    def last_words(self) -> str:
        """The line of its output that says what went wrong, if there is one, else the last."""
        text = self.log_file.read_text(errors="replace")
        lines = [re.sub(r"^\[[\d,]+\]<std\w+>:", "", line).strip() for line in text.splitlines()]
        errors = [line for line in lines if re.match(r"(Error: |[\w.]+(Error|Exception)\b)", line)]
        told = [line for line in lines if line]
        return (errors or told[-1:] or ["it said nothing"])[0][:300]


class RunView:
    """What can be seen of a run's folder from outside while a launch of it runs.

    Made before the launch: what is there then, records and folders that a launch before has left, is none of this launch's.

    Args:
        run: the folder; it need not exist yet.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._log_before = self._log_state()
        self._left_over = set(self._temporary())

    def last_step(self) -> int:
        """The last step in the log; 0 until this launch has written to it."""
        if self._log_state() == self._log_before:
            return 0
        return logged_step(self.run)

    def writing(self) -> bool:
        """Whether a snapshot is being written or removed."""
        return any(name not in self._left_over for name in self._temporary())

    def _temporary(self) -> list[str]:
        return [name for name in _names(self.run) if name.startswith(".step-")]

    def _log_state(self) -> tuple[int, int] | None:
        try:
            status = (self.run / "log.jsonl").stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


def logged_step(run: Path) -> int:
    """The last step in the log of a run; 0 if there is none."""
    try:
        with (run / "log.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
            found = STEP_RECORD.findall(file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def newest_step(run: Path) -> int:
    """The step of the newest snapshot that is in place; 0 if there is none."""
    return max((int(name[5:]) for name in _names(run) if name.startswith("step-")), default=0)


def _names(run: Path) -> list[str]:
    try:
        return os.listdir(run / "snapshots")
    except FileNotFoundError:
        return []
