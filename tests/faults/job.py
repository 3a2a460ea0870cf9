"""``hvd-ckpt train`` under a launcher, observed from outside: its processes, log and snapshots.

All processes of a job carry a mark in their environment. A process inherits its environment however it is started and whoever
its parent is by now, so orphans are found, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from pathlib import Path

import psutil

from hvd_ckpt.app.compare.runner.jobs import launch_command, rank_environment
from hvd_ckpt.processes.commands import Process, end_processes, error_line
from hvd_ckpt.processes.launchers import RANK_VARIABLES
from hvd_ckpt.snapshots.folder import names_in

ALL, LAUNCHER = "all ranks", "launcher"  # that get a signal
MARK = "HVD_CKPT_FAULTS"  # environment variable
MPI_LAUNCHERS = ("mpirun", "orterun", "mpiexec", "prterun")
STEP_LINE = re.compile(r"\bstep +(\d+)/\d+ ")
STEP_RECORD = re.compile(rb'"step": (\d+), "kind": "train"')
INTERVAL = 0.05  # seconds


def marked(token: str) -> list[psutil.Process]:
    """All other running processes whose environment has ``token`` as :data:`MARK`, the oldest first."""
    processes = (process for process in psutil.process_iter() if process.pid != os.getpid())
    mine = [process for process in processes if _variables(process).get(MARK) == token]
    return sorted(mine, key=lambda process: (process.create_time(), process.pid))


def _variables(process: psutil.Process) -> dict[str, str]:
    """The environment of a process; empty if it has ended, or belongs to another user."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def rank_of(process: psutil.Process) -> int | None:
    """The rank that the launcher gave a process, in an elastic job when it was started; None for launchers and shells."""
    variables = _variables(process)
    ranks = (variables.get(name, "") for name in RANK_VARIABLES)
    return next((int(rank) for rank in ranks if rank.isdecimal()), None)


def _place_of(process: psutil.Process) -> tuple[str, ...]:
    """The host of a rank and its number there, which no other running rank of an elastic job has."""
    variables = _variables(process)
    return tuple(variables.get(f"HOROVOD_{name}", "") for name in ("HOSTNAME", "LOCAL_RANK"))


def elastic_options(size: int, folder: Path) -> list[str]:
    """Options of horovodrun for an elastic job on up to ``size`` ranks, half of them on each of two names of this machine.

    A host one of whose ranks dies is left out, and comes back a few seconds later.
    """
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho localhost:{size // 2}\necho 127.0.0.1:{size // 2}\n")
    script.chmod(0o755)
    limits = ["--min-np", "1", "--max-np", str(size), "--blacklist-cooldown-range", "1", "3"]
    return [*limits, "--host-discovery-script", str(script)]


def flags(settings: dict[str, object]) -> list[str]:
    """Settings of ``hvd-ckpt train`` as its arguments; a tuple is a flag that is given several times."""
    pairs = ((name, value if isinstance(value, tuple) else (value,)) for name, value in settings.items())
    return [word for name, values in pairs for value in values for word in (f"--{name}", str(value))]


def write_text(path: Path) -> None:
    """Writes a text to train on."""
    path.write_bytes(bytes(range(32, 127)) * 40)


class TrainJob(Process):
    """``hvd-ckpt train`` with some arguments, launched at once; leaving the context ends all its processes."""

    def __init__(
        self, size: int, controller: str, arguments: list[str], log_file: Path, elastic: bool = False
    ) -> None:
        self.log_file = log_file
        self.token = secrets.token_hex(8)  # the mark of all its processes
        self._size, self._elastic = size, elastic
        options = elastic_options(size, log_file.parent) if elastic else []
        program = ("hvd_ckpt.app.cli.main", "train")
        command = launch_command(size, controller, *program, *arguments, options=options)
        super().__init__(command, log_file, {**rank_environment(1), MARK: self.token})

    @property
    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.status is not None

    def close(self) -> None:
        """Kills all processes of the job, including those that are started meanwhile."""
        # A launcher may start a process just before it is killed, so look until none is found.
        for _ in range(100):
            running = marked(self.token)
            end_processes(running)
            if not running:
                break
        super().close()

    def send(self, who: str, name: str) -> bool:
        """Sends the signal of that name to ``rank N``, ``all ranks`` or the ``launcher``; False if one of them is not running.

        In an elastic job, where ranks change, to the one that was started N-th of those that are running.
        """
        running = marked(self.token)
        if who == LAUNCHER:  # over MPI it is mpirun, a child of the process that was started first
            mpirun = [process.pid for process in running if process.name() in MPI_LAUNCHERS]
            targets = [*mpirun, *(process.pid for process in running)][:1]
        else:
            ranks: dict[object, int] = {}
            for process in running:
                if (rank := rank_of(process)) is not None:
                    # Of the processes that carry the number of a rank, the oldest.
                    ranks.setdefault(_place_of(process) if self._elastic else rank, process.pid)
            size = self._size
            if self._elastic:
                ranks, size = dict(enumerate(ranks.values())), len(ranks)
            numbers = range(size) if who == ALL else [int(who.removeprefix("rank ")) % max(size, 1)]
            if not ranks or any(number not in ranks for number in numbers):
                return False
            targets = [ranks[number] for number in numbers]
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])
        return True

    def left(self, limit: float) -> int:
        """The number of processes that still run ``limit`` seconds after the launcher has ended; they are killed."""
        deadline = time.monotonic() + limit
        while (running := marked(self.token)) and time.monotonic() < deadline:
            time.sleep(INTERVAL)
        self.close()
        return len(running)

    def first_step(self) -> int | None:
        """The first step in its output."""
        line = STEP_LINE.search(self.log_file.read_text(errors="replace"))
        return int(line[1]) if line else None

    def failure(self) -> str:
        """The line of its output that says what went wrong, and where its output is."""
        return f"{error_line(self.log_file)} (log: {self.log_file})"


class RunView:
    """The log and the snapshots of a run while one launch of it runs.

    It is made before the launch: records and temporary folders of earlier launches do not count.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._log_before, self._names_before = _log(run), self._temporary()

    def last_step(self) -> int:
        """The last step in the log; 0 until this launch has written to it."""
        return 0 if _log(self._run) == self._log_before else logged_step(self._run)

    def writing(self) -> bool:
        """Whether a snapshot is being written or removed."""
        return bool(self._temporary() - self._names_before)

    def _temporary(self) -> set[str]:
        return {name for name in names_in(self._run / "snapshots") if name.startswith(".step-")}


def _log(run: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (run / "log.jsonl").read_bytes()
    return b""


def logged_step(run: Path) -> int:
    """The last step in the log of a run, or 0."""
    steps = STEP_RECORD.findall(_log(run))
    return int(steps[-1]) if steps else 0


def newest_step(run: Path) -> int:
    """The step of the newest snapshot that is in place, or 0."""
    names = names_in(run / "snapshots")
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=0)
