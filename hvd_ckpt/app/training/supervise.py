"""Supervision: a job that dies is launched again, from the newest snapshot of its run.

``hvd-ckpt train --max-restarts N`` starts the ranks through a launcher (horovodrun, mpirun, srun; none for one process) and waits.
A job dies if a rank is killed, a host is cut off or an error occurs; all of its ranks then end. The whole job
is launched again, with ``--resume``, and ends with the weights of an undisturbed job. torchrun's ``--max-restarts``
does the same for its workers.

A signal to this process requests a stop. Launchers kill their ranks seconds after a signal, whether they have saved or not. So
this process creates the file ``stop`` in the run's folder, and the job stops after its step. The launcher gets a signal only if
that takes too long, or after a second signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from typing_extensions import Self

from hvd_ckpt.processes.probe import launcher_environment
from hvd_ckpt.snapshots.folder import SNAPSHOT, SnapshotError, step_of
from hvd_ckpt.snapshots.stopping import SIGNALS, STOP_FILE

FAILURE_FILE = "failure.txt"  # in which a job writes for its supervisor why a restart would fail the same way
SUPERVISED_VARIABLE = "HVD_CKPT_SUPERVISED"  # "1" where there is one
NOT_AGAIN = (2, 126, 127)  # exit statuses of an invalid setting or command
LONGEST_PAUSE = 30.0  # seconds
LEFT_OVER_SECONDS = 10.0  # for ranks to end after their launcher: horovodrun gives them 5
LAUNCHER_SECONDS = 15.0  # for a launcher to end after a signal: horovodrun takes 10
LOOK_SECONDS = 0.1  # between two looks for a signal and for the end of the job
REPEATED_SECONDS = 1.0
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # of prctl(2)


@dataclass(frozen=True)
class Commands:
    """The command lines of a supervised job.

    Attributes:
        launcher: that starts the ranks, with its arguments; empty for one process.
        first: the settings of ``hvd-ckpt train`` to begin with.
        again: the settings of a restart, once ``run`` holds something to resume from; they have ``--resume=`` and ``run``, in whose
            place that of a snapshot may be put.
        run: folder of the run.
        resumed: whether the run existed before; else its folder is new and empty.
    """

    launcher: Sequence[str]
    first: Sequence[str]
    again: Sequence[str]
    run: Path
    resumed: bool


def supervise(commands: Commands, max_restarts: int, grace: float) -> int:
    """Launches a job, and again each time that it dies. To be called in the main thread.

    Args:
        max_restarts: the most restarts.
        grace: seconds for the job to save and end after the first signal to this process. SIGUSR1 sets no limit: it is
            the early warning of a scheduler.

    Returns:
        The exit status: that of the job; 128 + signal if a signal stopped it; 2 if a setting is invalid, and 1 if a restart would
        fail in the same way for another reason.
    """
    for left in (FAILURE_FILE, STOP_FILE):  # of an earlier job
        _remove(commands.run / left)
    before = _snapshots_of(commands.run)
    restarts = 0
    settings = commands.first
    with _Signals() as signals, _subreaper():
        while True:
            # What follows a launch; the first line that holds decides:
            #
            #     a signal has come to this process    128 + signal
            #     failure.txt                          no restart, which would fail in the same way
            #     status 0                             the end of the run
            #     status 2, 126, 127, or the file stop no restart: invalid settings, or the user has asked for it
            #     no restart left                      the status of the job
            #     anything else                        a restart from the newest snapshot that this job has written
            job = _Launch(commands, settings)
            status = job.follow(signals, grace)
            if signals.first is not None:
                return _stopped(signals.first)
            failure = _failure(commands.run)
            if failure is not None:
                _say(f"not launched again: {failure}")
                if not (commands.run / "config.yaml").exists():
                    # A job that ended before its first step leaves a folder that can be given again.
                    _remove(commands.run / FAILURE_FILE)
                return status if status in NOT_AGAIN else 1
            if status == 0:
                return 0
            ended = f"the job ended ({_shown(status)})"
            reason = _reason(commands.run, status)
            if reason is not None:
                _say(f"{ended}; not launched again: {reason}")
                return status
            # Only snapshots that this job has written count: a run that was resumed from an older one may have later ones.
            new = max(
                _snapshots_of(commands.run) - before, key=lambda snapshot: step_of(snapshot[0]), default=None
            )
            settings, origin = _next_launch(commands, None if new is None else new[0])
            begun = (commands.run / "config.yaml").exists()
            if restarts == max_restarts:
                times = f" and was launched again {max_restarts} times" if max_restarts else ""
                resume = f"; `hvd-ckpt train --resume {origin}` resumes {_start_of(origin)}" if begun else ""
                _say(f"{ended}{times}{resume}")
                return status
            # A run that has not begun has no config.yaml to resume by, so its folder is given again, as an empty one.
            if not begun and not commands.resumed:
                _empty(commands.run)
            restarts += 1
            _say(f"{ended}; restart {restarts} of {max_restarts} {_start_of(origin)}")
            number = signals.wait(0.0 if restarts == 1 else min(2.0 ** (restarts - 2), LONGEST_PAUSE))
            if number is not None:
                return _stopped(number)


class _Launch:
    """One launch, with everything that it starts on this machine."""

    def __init__(self, commands: Commands, settings: Sequence[str]) -> None:
        self._run = commands.run
        # Other children, such as those of a test runner, are no part of the job and must not be killed with it.
        self._others = {child.pid for child in psutil.Process().children()}
        self._process = subprocess.Popen(
            [*commands.launcher, "env", f"{SUPERVISED_VARIABLE}=1", *_program(), "train", *settings],
            stdin=subprocess.DEVNULL,
            env=launcher_environment(),
            # Ctrl-C in the terminal comes to this process alone, which decides what the job hears of it.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def follow(self, signals: _Signals, grace: float) -> int:
        """Waits for the end, and stops the job when signals ask for it; no process of it is left then.

        Returns:
            the exit status, as a shell gives it
        """
        stop = _Stop(self._run, self._process.pid, grace)
        while self._process.poll() is None:
            stop.advance(signals.wait(LOOK_SECONDS))
        self._end_left_over(stop.seconds_to_end if stop.wanted else LEFT_OVER_SECONDS)
        if stop.wanted:
            _remove(self._run / STOP_FILE)
        # Python counts signals downwards from 0, and a shell upwards from 128.
        status = self._process.returncode
        return status if status >= 0 else 128 - status

    def _end_left_over(self, seconds: float) -> None:
        """Ranks outlive their launcher if it was killed; two jobs must not train in one folder."""
        limit = time.monotonic() + seconds
        # Descendants are looked for each time, since a rank may start processes until it ends.
        while left := self._left_over():
            if time.monotonic() >= limit:
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            psutil.wait_procs(left, timeout=0.1)

    def _left_over(self) -> list[psutil.Process]:
        """Descendants of this process that were not there before; orphans are its children."""
        children = psutil.Process().children()
        left = [child for child in children if child.pid not in self._others]
        for child in list(left):
            with contextlib.suppress(psutil.NoSuchProcess):
                left += child.children(recursive=True)
        return left


class _Stop:
    """Ends a job: by the file, then by a signal, then by force.

    Each follows when the time for the one before is over, or when another signal comes.
    """

    def __init__(self, run: Path, group: int, grace: float) -> None:
        self._run, self._group, self._grace = run, group, grace
        self._asked = self._told = False
        self._limit = math.inf
        # Time of the last signal. Some senders repeat theirs at once, which is not a second request.
        self._signal = -math.inf

    @property
    def wanted(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self._asked or self._told

    @property
    def seconds_to_end(self) -> float:
        """For a launcher, from a signal to the end of the last rank."""
        return max(self._grace, LAUNCHER_SECONDS)

    def advance(self, number: int | None) -> None:
        """Handles a signal, or None where only time has passed."""
        now = time.monotonic()
        # What the job gets, once the run has begun:
        #
        #     the first signal                    the file `stop`, and the grace to save and end
        #     the second, or the grace is over    SIGTERM to its process group (SIGINT for Ctrl-C), and `seconds_to_end`
        #     the third, or these are over        SIGKILL to its process group
        #     SIGUSR1                             the file `stop`, without a limit
        repeated = number is not None and now - self._signal < REPEATED_SECONDS
        if number is not None:
            self._signal = now
        # Schedulers send SIGUSR1 minutes before the end: time enough to save, and no limit of ours.
        if number == signal.SIGUSR1 and self._under_way():
            if not self.wanted:
                _say("the job is asked to save and end after its step")
            self._asked = True
        elif number is not None and self._limit == math.inf and not self._told and self._under_way():
            _say(
                f"the job is asked to save and end after its step, within {self._grace:g} s; a second signal ends it at once"
            )
            self._asked, self._limit = True, now + self._grace
        elif (number is not None and not repeated) or now >= self._limit:
            self._limit = now + self.seconds_to_end
            self._send(
                signal.SIGKILL if self._told else signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            )
            self._told = True
        # The file is touched again and again: a job that begins just now removes it, as one of an earlier job.
        if self._asked and not self._told:
            with contextlib.suppress(OSError):
                (self._run / STOP_FILE).touch()

    def _under_way(self) -> bool:
        return (self._run / "config.yaml").exists()

    def _send(self, number: int) -> None:
        """To the group: horovodrun --mpi is a shell that would die and leave mpirun behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Processes whose parents have ended become children of this one, so that it finds them."""
    prctl = ctypes.CDLL(None).prctl
    prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_with_parent() -> None:
    """In the launcher's process: it gets SIGTERM when the supervisor has died, however that died."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _program() -> list[str]:
    beside = Path(sys.executable).with_name("hvd-ckpt")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "hvd_ckpt.app.cli.main"]


def _reason(run: Path, status: int) -> str | None:
    """Why a failed job must not be launched again, although restarts are left; None if it may."""
    if status in NOT_AGAIN:
        return "that is the status of an invalid setting or command"
    if (run / STOP_FILE).exists():
        _remove(run / STOP_FILE)
        return f"'{run / STOP_FILE}' asked for a stop"
    return None


def _stopped(number: int) -> int:
    """Prints that a signal has ended it; returns the exit status."""
    _say(f"stopped by {asked_by(signal.Signals(number).name)}: not launched again")
    return 128 + number


def asked_by(reason: str) -> str:
    """The source of a request to stop, in words."""
    if reason != STOP_FILE:
        return "Ctrl-C (SIGINT)" if reason == "SIGINT" else reason
    supervised = os.environ.get(SUPERVISED_VARIABLE) == "1"
    return "a signal to hvd-ckpt" if supervised else f"the file '{STOP_FILE}' in its folder"


def _shown(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"exit status {status}, {signal.Signals(status - 128).name}"
    return f"exit status {status}"


def _failure(run: Path) -> str | None:
    """Why a restart would fail the same way, as rank 0 wrote it."""
    path = run / FAILURE_FILE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        lines = file.read(2000).decode(errors="replace").strip().splitlines()
    return lines[0] if lines else "the job reports that it would fail the same way"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _say(text: str) -> None:
    click.echo(f"hvd-ckpt: {text}", err=True)


def _next_launch(commands: Commands, new: Path | None) -> tuple[Sequence[str], Path]:
    """The settings of the next launch, and the run or snapshot that it resumes from.

    A run that was resumed from an older snapshot may still have later ones, from before this job.

    Args:
        new: the newest snapshot that this job has written.
    """
    run = commands.run
    if not commands.resumed:
        return commands.again if (run / "config.yaml").exists() else commands.first, run
    if new is None:
        given = [word.removeprefix("--resume=") for word in commands.first if word.startswith("--resume=")]
        return commands.first, Path(given[-1]).resolve() if given else run
    origin = run if _newest(run) == new else new
    again = [f"--resume={origin}" if word == f"--resume={run}" else word for word in commands.again]
    return again, origin


def _empty(run: Path) -> None:
    """Empties the new folder of a run that died before its first step."""
    for path in run.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _start_of(origin: Path) -> str:
    """The step of a run or snapshot to resume from, in words."""
    snapshot = origin if (origin / "manifest.json").is_file() else _newest(origin)
    return "from the beginning" if snapshot is None else f"from step {step_of(snapshot)}"


def _newest(run: Path) -> Path | None:
    from hvd_ckpt.snapshots.reader import newest

    with contextlib.suppress(SnapshotError):
        return newest(run / "snapshots")
    return None


def _snapshots_of(run: Path) -> set[tuple[Path, int]]:
    """The complete snapshots of a run, with the times at which they were written."""
    snapshots = set()
    for path in (run / "snapshots").glob("step-*"):
        with contextlib.suppress(OSError):
            if SNAPSHOT.fullmatch(path.name):
                snapshots.add((path, path.stat().st_mtime_ns))
    return snapshots


class _Signals:
    """Notes signals that ask for a stop; one that is ignored already, as under nohup, stays ignored.

    Attributes:
        first: the first that came.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._come: list[int] = []

    def __enter__(self) -> Self:
        self._handlers = {
            number: signal.signal(number, lambda number, _: self._come.append(number))
            for number in SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> int | None:
        """Waits for a signal, or for the time to pass (returns None)."""
        limit = time.monotonic() + seconds
        while not self._come:
            left = limit - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, LOOK_SECONDS))
        number = self._come.pop(0)
        self.first = self.first or number
        return number
