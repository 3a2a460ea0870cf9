"""Waits for other processes: the pauses between two looks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

POLL_SECONDS, LONGEST_POLL_SECONDS = 50e-6, 5e-3
POLL_GROWTH = 1.02  # so that a pause is at most 2 % of the wait so far
LOOK_SECONDS = 0.1  # signals wait for the end of a sleep


def pauses() -> Iterator[None]:
    """Pauses of a loop that waits, longer and longer: first none, then 50 us, at last 5 ms."""
    seconds = POLL_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * POLL_GROWTH, LONGEST_POLL_SECONDS)


def looks(handle: int, library: Any) -> Iterator[None]:
    """Looks at an operation of Horovod's: between two, this thread sleeps until the operation is done.

    Args:
        handle: of the operation.
        library: Horovod's extension. Only that of ``hvd-ckpt build-horovod`` ends the sleep; with others there are :func:`pauses`.
    """
    wait_for = getattr(library, "horovod_torch_wait_for", None)
    if wait_for is None:
        yield from pauses()
        return
    while True:
        yield
        wait_for(handle, LOOK_SECONDS)
