"""Waiting for signals that ask for a stop, in a process that supervises another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from typing_extensions import Self

from hvd_ckpt.training.stopping import SIGNALS

__all__ = ["Signals"]


class Signals:
    """Signals that ask for a stop, as something to wait for; one that is ignored already, as under nohup, stays so.

    Attributes:
        first: the first that has come.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._come: list[int] = []

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._waker = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._note)
            for number in (*SIGNALS, signal.SIGCHLD)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._waker)
        os.close(self._reading)
        os.close(self._writing)

    def _note(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._come.append(number)

    def wait(self, seconds: float | None) -> int | None:
        """Waits for a signal, for a child to end (returns None), or for the time to pass (returns None)."""
        if not self._come:
            select.select([self._reading], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reading, 4096)
        if not self._come:
            return None
        number = self._come.pop(0)
        self.first = self.first or number
        return number

    def pause(self, seconds: float) -> int | None:
        """Waits for a signal, or for the time to pass (returns None)."""
        limit = time.monotonic() + seconds
        while True:
            told = self.wait(max(limit - time.monotonic(), 0))
            if told is not None or time.monotonic() >= limit:
                return told
