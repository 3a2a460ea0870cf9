"""Commands in sessions of their own, which end with everything that they have started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from typing_extensions import Self

GRACE_SECONDS = 10.0  # for a launcher to end its ranks after SIGTERM


class Process:
    """A command in a session of its own, with its output in a file; ``with`` ends it and everything that it started.

    Args:
        command: to run.
        log_file: for standard output and standard error.
        environment: environment of the command.
    """

    def __init__(
        self, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status, None while the command runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if the command still runs after this number of seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def close(self) -> None:
        """Ends the command and what it started: SIGTERM, on which a launcher ends its ranks, then SIGKILL for what is left."""
        if self.status is not None:
            # A launcher that was ended itself may leave others behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return
        process = psutil.Process(self._process.pid)
        # Looked for before the signal: children of a process that has ended belong to another parent, and
        # would not be found.
        started = [process, *process.children(recursive=True)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self.wait(GRACE_SECONDS)
        end_processes(started)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kills processes, and waits a moment for their end; psutil leaves another process alone that has got the id of one."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=GRACE_SECONDS)


def error_line(log_file: Path) -> str:
    """The line of a log that says what went wrong: the end of a rank's first traceback, or else the last line."""
    text = log_file.read_text(errors="replace")
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    told = [line for line in lines if line]
    return errors[0] if errors else told[-1] if told else "the launcher printed nothing"
