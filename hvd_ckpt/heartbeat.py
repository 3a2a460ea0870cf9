"""Lines from work that takes long: nobody should have to ask whether a silent process hangs.

A terminal shows a live line. Elsewhere, in a log file or behind a pipe, a line is due at least every 30 seconds.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from typing_extensions import Self

SECONDS = 25.0  # of silence, so that lines that take their time come within 30


class Heartbeat:
    """Calls a function, on a thread of its own, whenever nothing was said for a while. A context manager.

    Args:
        speak: prints a line.
    """

    def __init__(self, speak: Callable[[], None]) -> None:
        self._speak = speak
        self._ended = threading.Event()
        self._said = time.monotonic()

    def said(self) -> None:
        """Notes that a line was printed; the next is due after another while."""
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        self.said()
        threading.Thread(target=self._run, name="hvd_ckpt heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(max(self._said + SECONDS - time.monotonic(), 0.01)):
            if time.monotonic() - self._said >= SECONDS:
                self.said()
                with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                    self._speak()


@contextlib.contextmanager
def talking(name: str, after: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Gives a function that prints on standard error what is being done now, and repeats it with the time while it lasts.

    Args:
        name: of the work, in front of each line.
        after: seconds in which nothing is printed: work that is done by then is silent.
    """
    start, now = time.monotonic(), ""

    def speak(also: str = "") -> None:
        print(f"{name}: {now}{also}", file=sys.stderr, flush=True)

    def say(what: str) -> None:
        nonlocal now
        now = what
        if time.monotonic() - start >= after:
            beat.said()
            speak()

    with Heartbeat(lambda: speak(f" ({elapsed(time.monotonic() - start)} so far)") if now else None) as beat:
        yield say


def elapsed(seconds: float) -> str:
    """``1:02:03``; ``?`` for what is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
