"""Texts for people: names of settings, messages about unknown names, byte sizes, ranks, and progress of long work.

Importing this module does not import PyTorch, so that help is fast.
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
"""Values of ``checkpoint``: the micro-batches that :func:`hvd_ckpt.accumulate` recomputes."""

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt", "step")
"""Names of learning rate schedules."""

PRECISIONS = ("fp32", "fp16", "bf16", "apex-O0", "apex-O1", "apex-O2", "apex-O3")
"""Recipes of :class:`hvd_ckpt.Precision`."""

STAGES = ("none", "optimizer", "gradients", "parameters")
"""Values of ``shard``: the stages of ZeRO, in their order."""

DOCUMENTS = ("lines", "jsonl")
"""Formats of a text with one document per line: the document itself, or a JSON object with the document as "text"."""

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
"""Types of the token ids in ``.bin`` files."""

BUILD_HOROVOD = "run `hvd-ckpt build-horovod`, which builds it for the PyTorch at hand"

LONGEST = 900  # most characters of a message
SECONDS = 25.0  # of silence before a line is printed, so that a line is out within 30 seconds


def stage_of(shard: object) -> int:
    """The stage, 0 to 3, that a name of :data:`STAGES` or a number (also as a text) stands for.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(shard, str) and shard in STAGES:
        return STAGES.index(shard)
    if isinstance(shard, str) and shard in map(str, range(len(STAGES))):
        return int(shard)
    if isinstance(shard, int) and not isinstance(shard, bool) and 0 <= shard < len(STAGES):
        return shard
    raise ValueError(f"shard must be one of {', '.join(map(repr, STAGES))}, or 0 to 3, not {shard!r}")


def stage_name(shard: object) -> object:
    """The name of its stage, or what was given where that is wrong."""
    try:
        return STAGES[stage_of(shard)]
    except ValueError:
        return shard


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The most similar known name, ignoring case and kind of dash; None if no name is similar."""
    plain = {_plain(candidate): candidate for candidate in known}
    matches = difflib.get_close_matches(_plain(name), plain, n=1)
    return plain[matches[0]] if matches else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One line for an error: ``no optimizer 'adamv': did you mean 'adamw'? Known: adam, adamw, sgd``.

    Args:
        what: the kind of thing, such as "optimizer".
        name: the given name.
        known: the known names, in the order of the message.
    """
    known, name = list(known), printable(name, but="")
    if not known:
        return f"no {what} '{name}': none is known"
    guess = nearest(name, known)
    hint = f": did you mean '{guess}'?" if guess else "."
    return f"no {what} '{name}'{hint} Known: {', '.join(known)}"


def printable(text: str, but: str = "\n\t") -> str:
    """A text in which characters that a terminal cannot show are escaped, except those in ``but``."""
    return (
        text
        if text.isprintable()
        else "".join(
            character if character.isprintable() or character in but else ascii(character)[1:-1]
            for character in text
        )
    )


def one_line(message: str) -> str:
    """A message as one line of printable characters, shortened in the middle if it is very long. It may quote unknown input."""
    message = printable(message, but="")
    return message if len(message) <= LONGEST else f"{message[: LONGEST - 300]} ... {message[-290:]}"


def show_bytes(count: int) -> str:
    """Bytes as text, such as ``1.50 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


class Heartbeat:
    """Context manager with a thread that calls a function whenever nothing was printed for a while.

    So even in a log file or behind a pipe, a line every 30 seconds shows that the process does not hang.

    Args:
        speak: prints a line.
    """

    def __init__(self, speak: Callable[[], None]) -> None:
        self._speak = speak
        self._ended = threading.Event()
        self._said = time.monotonic()

    def said(self) -> None:
        """Notes that a line was printed, after which the waiting time starts again."""
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
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                    self._speak()


@contextlib.contextmanager
def talking(name: str, after: float = 0.0) -> Iterator[Callable[[str], None]]:
    """A context that yields a function to print the current step of long work on standard error.

    The line is repeated with the time while the step lasts.

    Args:
        name: name of the work, printed in front of each line.
        after: seconds at the start in which nothing is printed.
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
    """Seconds as text, such as ``1:02:03``; ``?`` for a nonfinite number."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def check_instance(value: object, kind: type, wanted: str) -> None:
    """Raises a TypeError that says what is ``wanted`` unless the value is an object of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{wanted}, got {type(value).__name__}")


def read_when(value: str | int, name: str) -> str | int:
    """Validates a setting of when recomputation is verified; ``name`` is the name of the setting, for the error."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if value in ("first", "always", "never") or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 1
    ):
        return value
    raise ValueError(
        f"{name} must be 'first', 'always', 'never' or a number of passes from 1, got {value!r}."
    )
