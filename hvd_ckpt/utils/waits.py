"""Waits for other processes: the pauses between two looks, and names for the line that is printed when a wait is too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

POLL_SECONDS, LONGEST_POLL_SECONDS = 50e-6, 5e-3
POLL_GROWTH = 1.02  # so that a pause is at most 2 % of the wait so far
LOOK_SECONDS = 0.1  # signals wait for the end of a sleep

# Written by the thread itself, and read by the watchdog's when the wait has lasted too long.
_awaited: dict[int, str] = {}  # by thread


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


class waiting_for:
    """A context in which this thread waits for ``what``; an error that leaves it keeps these words (:func:`awaited_by`)."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._before = _awaited.get(self._thread, "")
        # A wait without words of its own keeps those of the wait around it.
        _awaited[self._thread] = self._what or self._before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _awaited[self._thread] = self._before
        if error is not None and self._what and not awaited_by(error):
            error.__dict__["awaited"] = self._what


def awaited_in(thread: int) -> str:
    """Name of the operation that a thread waits for; empty if it is not known."""
    return _awaited.get(thread, "")


def awaited_by(error: BaseException) -> str:
    """Name of the operation that was waited for when an error was raised; empty if it is not known."""
    words: str = error.__dict__.get("awaited", "")
    return words
