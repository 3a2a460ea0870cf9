"""The processes of a job on this machine, found in /proc by a mark in their environment: those of launcher, shells and ranks alike.

A process inherits its environment however it is started and whoever its parent is by now, so none escapes; one that has ended and
is only not yet waited for has no environment any more, and counts as gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.launchers import RANK_VARIABLES

__all__ = ["MARK", "Process", "end", "marked", "wait_until_gone"]

MARK = "HVD_CKPT_FAULTS"  # environment variable
PROC = Path("/proc")
INTERVAL = 0.05  # seconds


@dataclass(frozen=True)
class Process:
    """A process as it was found.

    Attributes:
        pid: its number.
        rank: that the launcher gave it; None for launchers and shells.
        name: of its program, at most 15 characters.
        started: clock ticks since the machine was.
    """

    pid: int
    rank: int | None
    name: str
    started: int


def marked(token: str) -> list[Process]:
    """All running processes whose environment has ``token`` as :data:`MARK`, the oldest first."""
    wanted = f"{MARK}={token}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or another user's
            variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if wanted in variables:
                name, started = _status(pid)
                found.append(Process(pid, _rank(variables), name, started))
    return sorted(found, key=lambda process: (process.started, process.pid))


def wait_until_gone(token: str, limit: float) -> list[Process]:
    """Those that are still there after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while (left := marked(token)) and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    return left


def end(token: str) -> None:
    """Ends all processes of the mark, also those that are started meanwhile."""
    for _ in range(100):
        found = marked(token)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(INTERVAL)


def _pids() -> Iterator[int]:
    own = os.getpid()
    return (int(name) for name in os.listdir(PROC) if name.isdecimal() and int(name) != own)


def _status(pid: int) -> tuple[str, int]:
    text = (PROC / str(pid) / "stat").read_text(errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, int(rest.split()[19])


def _rank(variables: list[bytes]) -> int | None:
    for variable in RANK_VARIABLES:
        start = f"{variable}=".encode()
        for text in variables:
            if text.startswith(start) and text[len(start) :].isdigit():
                return int(text[len(start) :])
    return None
