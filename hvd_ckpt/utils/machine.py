"""The machine that this process runs on: its name, its processes, and the memory that containers leave of it.

This module does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START_SECONDS = 5.0  # between two readings of one time, as clocks are adjusted
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {  # of a control group, by version: its limit, its use, and the part of that which the kernel gives up first
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def machine_name(*namespaces: str) -> str:
    """A text that is equal for processes on one machine since its last boot, if they share these namespaces (``pid``, ``net``).

    Raises:
        OSError: the system does not tell.
    """
    # Many machines have the same host name, and the numbers of their first namespaces are the same on all of them.
    shared = (os.readlink(f"/proc/self/ns/{namespace}") for namespace in namespaces)
    return " ".join((socket.gethostname(), BOOT_ID.read_text().strip(), *shared))


def process_status(number: int, started: float) -> str | None:
    """psutil's status of the process with a number and a time of start, in this process's table; None if it has ended.

    Raises:
        psutil.Error: it is not to be seen.
    """
    try:
        process = psutil.Process(number)
        status = process.status()
        # The kernel may have given the number to another process since: the time of its start tells them apart.
        same = abs(process.create_time() - started) < SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return None
    return status if same and status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else None


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that processes like this one have together, and how many of them are free: those of the machine, within the
    limits of the control groups around this process, as containers and batch systems set them."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _limits():
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group around this process that has a limit."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # not Linux
        lines = OWN_GROUPS.read_text().splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, use, cache = _FILES[1 if controllers else 2]
        top, own = GROUPS / ("memory" if controllers else ""), Path(path.lstrip("/"))
        # A container may see the path on the machine here, and there the root alone, which is its own group.
        for group in (top / folder for folder in (own, *own.parents)):
            with contextlib.suppress(OSError, ValueError):  # no limit: "max"
                most = int((group / limit).read_text())
                stat = (line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = next((int(value) for name, value in stat if name == cache), 0)
                yield most, int((group / use).read_text()) - cached
