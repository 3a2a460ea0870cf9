"""The machine that this process runs on: its name and its processes.

This module does not import PyTorch.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START_SECONDS = 5.0  # between two readings of one time, as clocks are adjusted


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
