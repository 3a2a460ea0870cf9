"""What the library may do with hostile input, and a watch over it.

Allowed are a value, or an error of the kind's own classes with a message of one line. Everything else is a finding: another error,
an exit, a longer message, a program that is started, a pickle that is loaded, a file outside the input's folder that is opened for
writing, removed or changed, more than five seconds of CPU time or a gigabyte of memory, or no end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hostile import PRECIOUS, Draw

CPU_SECONDS = 5.0
HANG_SECONDS = 30.0  # a machine that is shared may be slow
MEMORY = 1 << 30
ADDRESS_SPACE = 24 << 30  # more than is in use: what asks for it gets a MemoryError, not the machine's memory
MESSAGE = 1000  # characters
STARTS = {f"os.{name}" for name in ("system", "exec", "fork", "forkpty", "posix_spawn")} | {
    "subprocess.Popen", "pickle.find_class", "socket.connect",
}  # fmt: skip
CHANGES = {
    f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "truncate", "symlink", "link", "chmod")
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Finding(BaseException):
    """The library did something that it must not; no code under test should catch it."""


Feed = Callable[[Draw, Path], str | None]
"""Feeds one input, which it makes of draws in an empty folder, and returns the outcome in a word, or None if it was accepted.

Beside the folder lies ``outside``, with a file that nobody may read or change."""


class Kind(NamedTuple):
    """A kind of input."""

    name: str
    errors: tuple[type[BaseException], ...]  # that an input may end in
    prepare: Callable[[Path], Feed]  # makes valid input in a folder, once


class Watch:
    """The folders of a run, and what happens while an input is fed."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="hvd_ckpt_fuzz_"))
        self.outside, self.input = self.root / "outside", self.root / "input"
        self._watching = False
        self._seen: list[str] = []
        sys.addaudithook(self._audit)

    def feed(self, feed: Feed, errors: Any, draw: Draw) -> str:
        """The outcome of one input; raises a Finding if it is not allowed."""
        for folder in (self.input, self.outside):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (self.outside / "precious.txt").write_text(PRECIOUS)
        self._seen.clear()
        held, began = _reset_peak_memory(), time.process_time()
        with _alarm(HANG_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw.watched = self._watched
            try:
                with self._watched():
                    outcome = feed(draw, self.input) or "accepted"
            except errors as error:
                outcome = f"refused: {type(error).__name__}"
                check_message(str(error))
        if self._seen:
            raise Finding(self._seen[0])
        left = os.listdir(self.outside)
        if left != ["precious.txt"] or (self.outside / left[0]).read_text() != PRECIOUS:
            raise Finding(f"files outside were changed: {left}")
        if (spent := time.process_time() - began) > CPU_SECONDS:
            raise Finding(f"it took {spent:.1f} s of CPU time")
        if (grown := _peak_memory() - held) > MEMORY:
            raise Finding(f"it took {grown >> 20} MiB of memory")
        return outcome

    @contextlib.contextmanager
    def _watched(self, on: bool = True) -> Iterator[None]:
        before, self._watching = self._watching, on
        try:
            yield
        finally:
            self._watching = before

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watching and (wrong := self._wrong(event, arguments)):
            self._seen.append(wrong)

    def _wrong(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event in STARTS:
            return f"{event} was called: {arguments!r:.200}"
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        removes = event in ("os.remove", "os.rmdir")
        if removes and isinstance(arguments[-1], int) and arguments[-1] >= 0:
            return None  # relative to a folder that is open
        place = arguments[event in ("os.symlink", "os.link")] if writes or event in CHANGES else None
        if not isinstance(place, (str, bytes)):
            return None
        path = os.path.abspath(os.fsdecode(place))
        compiled = "__pycache__" in path or (sys.pycache_prefix and path.startswith(sys.pycache_prefix))
        allowed = compiled or path.startswith((str(self.root), "/dev/null", "/proc/self", "/dev/shm"))
        return None if allowed else f"{event} of {path}, which is outside"


def check_message(message: str) -> None:
    """Raises Finding unless it is a message of one line."""
    if not message.strip() or len(message) > MESSAGE or not message.isprintable():
        raise Finding(
            f"a message of {len(message)} characters in {len(message.splitlines())} lines: {message[:300]!r}"
        )


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> NoReturn:
        raise Finding(f"no end after {seconds:g} s: {''.join(traceback.format_stack(frame)[-3:])}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _reset_peak_memory() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def limit_address_space() -> None:
    """Makes an absurd allocation an error of this process, and not the end of others."""
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
