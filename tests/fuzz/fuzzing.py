"""Feeds hostile inputs to the library and watches what it does.

An input is drawn from a kind and a seed alone, so that one that was found can be repeated. What may come of it: a value, or an
error of the kind's own classes with a message of one line. All else is a finding: another error, an exit, a message that is none,
a program that is started, a pickle that is loaded, a file outside the kind's folder that is opened for writing, removed or
changed, more than five seconds of CPU time or a gigabyte of memory, or no end.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

CPU_SECONDS = 5.0
HANG_SECONDS = 30.0  # a machine that is shared may be slow
MEMORY = 1 << 30
ADDRESS_SPACE = (
    24 << 30
)  # beyond what is in use: what asks for more gets a MemoryError instead of the machine's memory
MESSAGE = 1000  # characters

PRECIOUS = "precious.txt"
PRECIOUS_TEXT = "nobody may touch this\n" * 3


class Finding(BaseException):
    """What must not come of an input; no code that is fed should catch it."""


class Kind(ABC):
    """A kind of input.

    Attributes:
        name: in reports and for ``--only``.
        share: of all inputs, relative to those of the other kinds.
        errors: classes that an input may end in.
    """

    name: str
    share: float = 1.0
    errors: tuple[type[BaseException], ...] = (ValueError,)

    def prepare(self, folder: Path) -> None:
        """Makes what is good, once."""
        return

    @abstractmethod
    def feed(self, draw: random.Random, folder: Path) -> str:
        """Feeds one input, made in an empty folder, and returns in a word what came of it, such as "accepted".

        Beside the folder lies ``outside``, with ``precious.txt`` in it.

        Raises:
            Finding: what came of it is wrong.
        """


class Sandbox:
    """The folders of a run, and what is watched while an input is fed."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="hvd_ckpt_fuzz_"))
        self.outside = self.root / "outside"
        self.outside.mkdir()
        self.input = self.root / "input"
        self.watching = False
        self.seen: list[str] = []
        for kind in kinds:
            (self.root / kind.name).mkdir()
            kind.prepare(self.root / kind.name)
        self._restore()
        sys.addaudithook(self._audit)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, kind: Kind, seed: int) -> str:
        """What came of one input.

        Raises:
            Finding: something that must not.
        """
        shutil.rmtree(self.input, ignore_errors=True)
        self.input.mkdir()
        self.seen.clear()
        draw = random.Random(f"{kind.name}:{seed}")
        held = _reset_peak_memory()
        began = time.process_time()
        with _alarm(HANG_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.watching = True
            try:
                outcome = kind.feed(draw, self.input)
            except kind.errors as error:
                outcome = f"refused: {type(error).__name__}"
                check_message(str(error))
            finally:
                self.watching = False
        if self.seen:
            raise Finding(self.seen[0])
        self._check_outside()
        if (spent := time.process_time() - began) > CPU_SECONDS:
            raise Finding(f"it took {spent:.1f} s of CPU time")
        if (grown := _peak_memory() - held) > MEMORY:
            raise Finding(f"it took {grown >> 20} MiB of memory")
        return outcome

    def _restore(self) -> None:
        shutil.rmtree(self.outside)
        self.outside.mkdir()
        (self.outside / PRECIOUS).write_text(PRECIOUS_TEXT)

    def _check_outside(self) -> None:
        names = os.listdir(self.outside)
        if names != [PRECIOUS] or (self.outside / PRECIOUS).read_bytes() != PRECIOUS_TEXT.encode():
            self._restore()
            raise Finding(f"what lies outside was changed: {names}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching:
            wrong = _wrong_event(event, arguments, str(self.root))
            if wrong is not None:
                self.seen.append(wrong)


STARTS = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect",
)  # fmt: skip
CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.symlink",
    "os.link",
    "os.chmod",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _wrong_event(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    if event in STARTS:
        return f"{event} was called: {arguments!r:.200}"
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        place = arguments[0]
    elif event in CHANGES:
        if isinstance(arguments[-1], int) and arguments[-1] >= 0 and event in ("os.remove", "os.rmdir"):
            return None  # relative to a folder that is open
        place = arguments[1] if event in ("os.symlink", "os.link") else arguments[0]
    else:
        return None
    if not isinstance(place, (str, bytes)) or os.fsdecode(place).startswith(
        ("/dev/null", "/proc/self", "/dev/shm")
    ):
        return None
    path = os.path.abspath(os.fsdecode(place))
    if path.startswith(root) or "__pycache__" in path:
        return None
    return f"{event} of {path}, which is outside"


def check_message(message: str) -> None:
    """Raises Finding for what is no message of one line."""
    if not message.strip() or len(message) > MESSAGE or not message.isprintable():
        raise Finding(
            f"a message of {len(message)} characters, {message.count(chr(10))} line ends: {message[:300]!r}"
        )


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> NoReturn:
        where = "".join(traceback.format_stack(frame)[-3:])
        raise Finding(f"no end after {seconds:g} s: {where}")

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
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def limit_address_space() -> None:
    """Makes an absurd allocation an error of this process, and not the end of others."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_SPACE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def seeds_of(kinds: list[Kind], inputs: int, first: int) -> Iterator[tuple[Kind, int]]:
    """Each kind with its share of the seeds, one at least."""
    total = sum(kind.share for kind in kinds)
    for kind in kinds:
        for seed in range(max(round(inputs * kind.share / total), 1)):
            yield kind, first * 1_000_000 + seed
