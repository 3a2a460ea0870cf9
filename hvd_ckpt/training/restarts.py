"""A launcher around the launcher: a job that dies is launched again, from the newest snapshot of its run.

``hvd-ckpt train --max-restarts N`` starts the ranks through a launcher (horovodrun, mpirun, srun; none for one process) and waits.
However a job dies, by a rank that is killed, a host that is cut off or an error, all of its ranks end; so the whole job
is launched again, with ``--resume``, and ends with the weights of a job that was never disturbed. torchrun's ``--max-restarts``
does the same for its workers.

A signal to this process asks for a stop. Launchers kill their ranks seconds after a signal, whether they have saved or not, so
the job is asked through the file ``stop`` in the run's folder, which it obeys after its step; only when that takes too long, or
on a second signal, is the launcher told.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import psutil

from hvd_ckpt.probe import launcher_environment
from hvd_ckpt.training.relaunching import Commands, newest_but, next_settings, origin, snapshots_of, start_of
from hvd_ckpt.training.signals import Signals
from hvd_ckpt.training.stopping import FAILURE_FILE, STOP_FILE, SUPERVISED_VARIABLE, asked_by

__all__ = ["Commands", "supervise"]

NOT_AGAIN = (2, 126, 127)  # a setting or a command that cannot be
LONGEST_PAUSE = 30.0  # seconds
LEFT_OVER_SECONDS = 10.0  # that ranks may take to end after their launcher: horovodrun gives them 5
LAUNCHER_SECONDS = 15.0  # that a launcher may take to end after a signal: horovodrun takes 10
LOOK_SECONDS = 0.5
REPEATED_SECONDS = 1.0
CHILD_SUBREAPER = 36  # of prctl(2)
# Ends the process group $0 when the writer of its input has died, however that died.
GUARD = """
read _
kill -TERM -$0
for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 1; kill -0 -$0 || exit; done 2>/dev/null
kill -KILL -$0
"""


def supervise(commands: Commands, max_restarts: int, grace: float) -> int:
    """Launches a job, and again each time that it dies. To be called in the main thread.

    Args:
        max_restarts: how often it is launched again at most.
        grace: seconds that the job has to save and end after the first signal to this process. SIGUSR1 sets no limit: it is
            the early warning of a scheduler.

    Returns:
        the exit status: the job's; 128 + signal if it was stopped by one; 1 if the job says that a restart would end the same way
    """
    for left in (FAILURE_FILE, STOP_FILE):  # of a job before
        _remove(commands.run / left)
    before = snapshots_of(commands.run)
    restarts = 0
    settings = commands.first
    with Signals() as signals, _subreaper():
        while True:
            job = _Job(commands, settings)
            status = job.follow(signals, grace)
            if signals.first is not None:
                return _stopped(signals.first)
            failure = _failure(commands.run)
            if failure is not None:
                _say(f"not launched again: {failure}")
                if not (commands.run / "config.yaml").exists():
                    _remove(commands.run / FAILURE_FILE)  # the folder can be used again
                return 1
            if status == 0:
                return status
            ended = f"the job ended ({_shown(status)})"
            reason = _reason(commands.run, status)
            if reason is not None:
                _say(f"{ended}; not launched again: {reason}")
                return status
            new = newest_but(commands.run, before)
            if restarts == max_restarts:
                times = f" and was launched again {max_restarts} times" if max_restarts else ""
                _say(f"{ended}{times}{_how_to_go_on(origin(commands, new), commands.run)}")
                return status
            settings = next_settings(commands, new)
            restarts += 1
            _say(f"{ended}; restart {restarts} of {max_restarts} {start_of(origin(commands, new))}")
            told = signals.pause(_pause(restarts))
            if told is not None:
                return _stopped(told)


class _Job:
    """One launch, with everything that it starts on this machine."""

    def __init__(self, commands: Commands, settings: Sequence[str]) -> None:
        self._run = commands.run
        self._others = {child.pid for child in psutil.Process().children()}
        self._process = subprocess.Popen(
            [*commands.launcher, "env", f"{SUPERVISED_VARIABLE}=1", *_program(), "train", *settings],
            stdin=subprocess.DEVNULL,
            env=launcher_environment(),
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, str(self._process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._others.add(self._guard.pid)

    def follow(self, signals: Signals, grace: float) -> int:
        """Waits for the end, and brings it about when signals ask for it; nothing of the job is left then.

        Returns:
            the exit status, as a shell would say it
        """
        stop = _Stop(self._run, self._process.pid, grace)
        while self._process.poll() is None:
            told = signals.wait(LOOK_SECONDS if stop.wanted else None)
            stop.go_on(told)
        self._end_left_over(stop.seconds_to_end if stop.wanted else LEFT_OVER_SECONDS)
        self._guard.kill()
        self._guard.communicate()
        if stop.wanted:
            _remove(self._run / STOP_FILE)
        status = self._process.returncode
        return status if status >= 0 else 128 - status

    def _end_left_over(self, seconds: float) -> None:
        """Ranks outlive their launcher if it was killed; two jobs must not train in one folder."""
        limit = time.monotonic() + seconds
        while left := self._left_over():
            if time.monotonic() >= limit:
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            psutil.wait_procs(left, timeout=0.1)

    def _left_over(self) -> list[psutil.Process]:
        """What descends from this process and was not there before; orphans are children of this process."""
        children = psutil.Process().children()
        found = [child for child in children if child.pid not in self._others]
        for child in list(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
        return found


class _Stop:
    """How a job is brought to its end: asked by the file, then told by a signal, then killed.

    Each way is taken when the one before has had its time, or when a further signal comes.
    """

    def __init__(self, run: Path, group: int, grace: float) -> None:
        self._run, self._group, self._grace = run, group, grace
        self._asked = self._told = False
        self._limit = math.inf
        self._signal = -math.inf  # when the last came: some senders repeat theirs at once

    @property
    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self._asked or self._told

    @property
    def seconds_to_end(self) -> float:
        """That a launcher has, from a signal to the end of the last rank."""
        return max(self._grace, LAUNCHER_SECONDS)

    def go_on(self, number: int | None) -> None:
        """Heeds a signal, or None where only time has passed."""
        now = time.monotonic()
        repeated = number is not None and now - self._signal < REPEATED_SECONDS
        if number is not None:
            self._signal = now
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
        if self._asked and not self._told:  # a job that has just begun forgets what was asked before
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


def _program() -> list[str]:
    beside = Path(sys.executable).with_name("hvd-ckpt")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "hvd_ckpt.cli.main"]


def _how_to_go_on(start: Path, run: Path) -> str:
    if not (run / "config.yaml").exists():
        return ""
    return f"; `hvd-ckpt train --resume {start}` goes on {start_of(start)}"


def _reason(run: Path, status: int) -> str | None:
    """Why a job that has failed is not to be launched again, though there are restarts left; None if it is."""
    if status in NOT_AGAIN:
        return "that is the status of a setting or a command that cannot be"
    if (run / STOP_FILE).exists():
        _remove(run / STOP_FILE)
        return f"'{run / STOP_FILE}' asked for a stop"
    return None


def _stopped(number: int) -> int:
    """Says that a signal has ended it; returns the exit status."""
    _say(f"stopped by {asked_by(signal.Signals(number).name)}: not launched again")
    return 128 + number


def _shown(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"exit status {status}, {signal.Signals(status - 128).name}"
    return f"exit status {status}"


def _pause(restarts: int) -> float:
    """Seconds before a restart: none, 1, 2, 4 and so on."""
    return 0.0 if restarts == 1 else min(2.0 ** (restarts - 2), LONGEST_PAUSE)


def _failure(run: Path) -> str | None:
    """Why a restart would end the same way, as rank 0 wrote it."""
    path = run / FAILURE_FILE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        lines = file.read(2000).decode(errors="replace").strip().splitlines()
    return lines[0] if lines else "the job says that it would end the same way"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _say(text: str) -> None:
    click.echo(f"hvd-ckpt: {text}", err=True)
