"""Texts for people: names of settings, messages about unknown ones, byte sizes, and lines from work that takes long.

Importing it imports no PyTorch, so that help is quick.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from typing_extensions import Self

CHECKPOINTS = ("always", "except_last", "never")
"""Which micro-batches :func:`hvd_ckpt.accumulate` recomputes."""

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt", "step")
"""Decays of the learning rate."""

PRECISIONS = ("fp32", "fp16", "bf16", "apex-O0", "apex-O1", "apex-O2", "apex-O3")
"""Recipes of :class:`hvd_ckpt.Precision`."""

DOCUMENTS = ("lines", "jsonl")
"""What each line of a text may be, where it is a document: that itself, or a JSON object whose "text" it is."""

BUILD_HOROVOD = "run `hvd-ckpt build-horovod`, which builds it for the PyTorch at hand"

LONGEST = 900  # characters of a message
SECONDS = 25.0  # of silence, so that lines that take their time come within 30


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, whatever the case and the kind of dash; None if none does."""
    plain = {_plain(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[found[0]] if found else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line for an error: ``no optimizer 'adamv': did you mean 'adamw'? Known: adam, adamw, sgd``.

    Args:
        what: the kind of thing that was asked for.
        name: as it was given.
        known: the right names, listed in this order.
    """
    known, name = list(known), printable(name, but="")
    if not known:
        return f"no {what} '{name}': none is known"
    guess = nearest(name, known)
    hint = f": did you mean '{guess}'?" if guess else "."
    return f"no {what} '{name}'{hint} Known: {', '.join(known)}"


def printable(text: str, but: str = "\n\t") -> str:
    """A text whose characters can all be shown on a terminal: others are escaped, ``but`` these."""
    return (
        text
        if text.isprintable()
        else "".join(one if one.isprintable() or one in but else ascii(one)[1:-1] for one in text)
    )


def one_line(message: str) -> str:
    """A message as one line of printable characters, cut in the middle if it is very long: it may quote what somebody has made."""
    message = printable(message, but="")
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 300]} ... {message[-290:]}"


def show_bytes(count: int) -> str:
    """``1.50 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


class Heartbeat:
    """Calls a function, on a thread of its own, whenever nothing was said for a while. A context manager.

    Nobody should have to ask whether a silent process hangs: in a log file or behind a pipe, a line is due every 30 seconds.

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


def read_when(value: str | int, name: str) -> str | int:
    """When recomputation is verified: what a text or number stands for. ``name`` is that of the setting, for the error."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if value in ("first", "always", "never") or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 1
    ):
        return value
    raise ValueError(
        f"{name} must be 'first', 'always', 'never' or a number of passes from 1, got {value!r}."
    )
