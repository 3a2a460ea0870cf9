"""Requests to stop: signals, and the file ``stop`` in a run's folder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import Self

STOP_FILE = "stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LOOK_SECONDS = 1.0  # between two looks for the file, which may be on a slow file system


class StopRequest:
    """Notes requests to stop while its context is entered. A program's own signal handlers stay in place.

    A second Ctrl-C interrupts at once.

    Args:
        folder: folder of the run, on the rank that looks for ``stop`` in it; None on the others.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / STOP_FILE
        self._looked = 0.0
        self._reason: str | None = None
        self._replaced: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """The signal's name, ``"stop"`` for the file, or None without a request."""
        if self._reason is None and self._file is not None:
            now = time.monotonic()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                if os.path.exists(self._file):  # false as well where the file system has trouble
                    self._reason = STOP_FILE
        return self._reason

    @reason.setter
    def reason(self, reason: str | None) -> None:
        self._reason = reason

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Python allows signal.signal() in the main thread only. A program's own handlers stay.
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._replaced[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def acknowledge(self) -> None:
        """Forgets the request and removes the file: the run has stopped."""
        self._reason = None
        if self._file is not None:
            forget_file(self._file.parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._reason is not None:
            raise KeyboardInterrupt
        # Only noted: a handler runs between any two bytecodes, perhaps while this rank is in a collective.
        self._reason = signal.Signals(number).name


def status_of(reason: str | None) -> int:
    """The exit status of a run that a request has stopped: 128 + the number of the signal; 0 for the file, or without a request."""
    return 0 if reason in (None, STOP_FILE) else 128 + signal.Signals[reason]


def in_words(reason: str) -> str:
    """The source of a request, for messages."""
    if reason == STOP_FILE:
        return f"the file '{STOP_FILE}' in its folder"
    return "Ctrl-C (SIGINT)" if reason == "SIGINT" else reason


def forget_file(folder: Path) -> None:
    """Removes the file from a run's folder, if it is there: it was for a run that has ended."""
    with contextlib.suppress(OSError):
        (folder / STOP_FILE).unlink()
