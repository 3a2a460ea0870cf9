"""A watchdog over every wait for other ranks: a wait that is too long ends the process, with a line that names the reason.

Horovod or its launcher detects a rank that has died. They do not detect a rank that is stopped, stuck, or on a machine that is cut
off. Over MPI the others then wait inside a collective for ever, over Gloo until Gloo's time limit. A waiting thread releases the
interpreter, so another thread of this process can measure the wait. After a minute, or half of a limit shorter than two minutes,
it prints one line, and at the limit it ends the process. So ranks that wait for different operations have all printed a line
before the first of them ends.

The watchdog covers Horovod's start and end, all waits for collectives (Horovod's calls and this library's go through one
function), loops that poll for one, and changes of process sets. The name of the operation is read from the stack of the waiting
thread at the limit, so a wait itself costs two entries in a dictionary. The clock stops while the process is stopped, so a job
that is suspended as a whole and resumed continues.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import horovod
import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_ckpt.processes.grid import host_name, of_job
from hvd_ckpt.processes.launchers import is_elastic, launched_rank
from hvd_ckpt.utils.waits import looks

if TYPE_CHECKING:
    from hvd_ckpt.processes.hosts import Peer

TICK_SECONDS = 1.0
POLL_LOOP_SECONDS = 2.0  # a handle that was polled this lately is being waited for
NOTICE_SECONDS = 60.0  # a wait that lasts longer is announced
SAYING_SECONDS = 1.0  # how long a full pipe may keep the last line
_LIBRARIES = (
    *(str(Path(file).parent) for file in (horovod.__file__, torch.__file__, Path(__file__).parent)),
    contextlib.__file__,  # of functions that are decorated with a context
)


class Wait(NamedTuple):
    """A wait of a thread.

    Attributes:
        since: when it began, on the watchdog's clock.
        what: what is waited for, where the stack of the thread does not tell.
        least: seconds that it may last whatever the limit is.
        until: when it is over by itself.
    """

    since: float
    what: str = ""
    least: float = 0.0
    thread: int = 0
    until: float = math.inf


@dataclass
class Watchdog:
    """The waits of this process and the thread that watches them; one per process."""

    # Written by the threads that wait and read by the watchdog's, without a lock: each entry is one object, and the watchdog
    # iterates over copies. By thread, and by Horovod's handle for one that is polled, with a minus.
    waits: dict[int, Wait] = field(default_factory=dict)
    announced: dict[Any, float] = field(default_factory=dict)  # when the last announced wait began
    unlimited: set[int] = field(default_factory=set)  # threads whose waits may last
    timeout: float | None = None  # seconds a wait may last; None without a limit
    peers: list[Peer] = field(default_factory=list)  # all ranks, once they have met
    # Each is called every second, and gives what is waited for without a thread that waits.
    looks: Sequence[Callable[[], Wait | None]] = ()
    stopped: float = 0.0  # seconds this process has been stopped for; the clock leaves them out
    thread: threading.Thread | None = None

    def now(self) -> float:
        return time.monotonic() - self.stopped

    def start(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name="hvd_ckpt watchdog", daemon=True)
            self.thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            # The process was stopped, or the machine was: that time counts for no wait.
            if now - before > 2 * TICK_SECONDS:
                self.stopped += now - before - TICK_SECONDS
            before = now
            self._announce()
            wait = self._late()
            if wait is not None:
                from hvd_ckpt.processes.hosts import Peer, diagnose  # loaded with the limit

                what, seconds = _words_for(wait), self.now() - wait.since
                # It asks other hosts, which takes a second or two. The wait may end meanwhile, so it is looked at again.
                try:
                    finding = diagnose(self.peers, Peer.here(_number() or 0))
                except Exception as error:  # this process ends all the same
                    finding = f"the other ranks cannot be looked for ({error})"
                if self._late() is not None:
                    end(f"{who()}: waited {seconds:.0f} s for {what}; {finding}")

    def _late(self) -> Wait | None:
        """A wait that has lasted too long."""
        if self.timeout is None:
            return None
        waits, now = self._longer_than(self.timeout), self.now()
        return next((wait for _, wait in waits if now - wait.since > wait.least), None)

    def _longer_than(self, seconds: float) -> Iterator[tuple[Any, Wait]]:
        """Waits that have lasted longer, each with a key of its own."""
        now = self.now()
        waits: dict[Any, Wait] = dict(self.waits)
        for look in self.looks:
            if (looked := look()) is not None and not self.unlimited:
                waits[look] = looked
        for key, wait in waits.items():
            if now - wait.since > seconds and now < wait.until and wait.thread not in self.unlimited:
                yield key, wait

    def _announce(self) -> None:
        """Says what is waited for, once for each wait."""
        soon = NOTICE_SECONDS if self.timeout is None else min(NOTICE_SECONDS, self.timeout / 2)
        for key, wait in self._longer_than(soon):
            if self.announced.get(key) != wait.since:
                self.announced[key] = wait.since
                limit = (
                    "hvd_ckpt.init(stall_timeout=...) limits it"
                    if self.timeout is None
                    else f"the limit is {max(self.timeout, wait.least):g} s"
                )
                _say_in_background(
                    f"{who()}: still waiting, after {self.now() - wait.since:.0f} s, for {_words_for(wait)}; {limit}"
                )


_dog = Watchdog()


def check_timeout(seconds: Any) -> None:
    """Raises ValueError unless ``seconds`` is a number above zero."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
        raise ValueError(
            f"stall_timeout must be a number of seconds above zero, or None for waits without a limit, not {seconds!r}"
        )


def watch(seconds: float | None = None) -> None:
    """Announces each wait of more than a minute (or half of the limit), and ends this process if one is longer than ``seconds``.

    With a limit, ranks tell each other where they run if Horovod runs, and else when it starts. Then it is collective.

    Args:
        seconds: the limit from now on, ``math.inf`` for no limit; None leaves it as it is. At first there is no limit.

    Raises:
        ValueError: ``seconds`` is not a number above zero.
    """
    if seconds is not None:
        check_timeout(seconds)
        import hvd_ckpt.processes.hosts  # noqa: F401  # here, as the file system may be what a later wait is for

        _dog.timeout = None if math.isinf(seconds) else float(seconds)
    if _dog.thread is None:
        _install()
    _dog.start()
    if seconds is not None:
        _meet()


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """Inside, this thread's waits have no limit: one rank has work to do that takes its time, and the others wait for it."""
    thread = threading.get_ident()
    # Of contexts within each other, the outermost one gives the limit back.
    first = thread not in _dog.unlimited
    _dog.unlimited.add(thread)
    try:
        yield
    finally:
        if first:
            _dog.unlimited.discard(thread)


@contextlib.contextmanager
def waiting(what: str = "", least: float = 0.0) -> Iterator[None]:
    """Around a wait for another process, which is watched; within another one, that goes on afterwards.

    Args:
        what: what is waited for, in words, for the message; by default those of the wait around this one, or what the stack tells.
            An error that leaves the context keeps them (:func:`awaited_by`).
        least: seconds that it may last whatever the limit is.
    """
    thread = threading.get_ident()
    around = _dog.waits.get(thread)
    _dog.waits[thread] = Wait(_dog.now(), what or (around.what if around else ""), least, thread)
    try:
        yield
    except BaseException as error:
        if what:
            error.__dict__.setdefault("awaited", what)
        raise
    finally:
        _dog.waits.pop(thread, None)
        if around is not None:
            _dog.waits[thread] = around


def awaited_by(error: BaseException) -> str:
    """What was waited for when an error was raised; empty if it is not known."""
    return str(error.__dict__.get("awaited", ""))


def now() -> float:
    """Seconds on the watchdog's clock."""
    return _dog.now()


def look_every_second(*looks: Callable[[], Wait | None]) -> None:
    """Calls these on the watchdog's thread, each of which returns what is being waited for, such as by a GPU."""
    _dog.looks = looks


def introduce(peers: Sequence[Peer]) -> None:
    """Tells where each process of the job runs, for the message, where Horovod's ranks are only some of them."""
    _dog.peers = list(peers)


def _number() -> int | None:
    """The rank of this process in the whole job."""
    with contextlib.suppress(ValueError):  # Horovod's, if it ends meanwhile
        if hvd.is_initialized():
            return of_job().number
    return launched_rank()


def who() -> str:
    """This process in words: its rank in the whole job, and its host."""
    rank = _number()
    return f"{f'process {os.getpid()}' if rank is None else f'rank {rank}'} on host {host_name()}"


def _meet() -> None:
    """Tells all ranks where each one runs, for the message, unless they know; collective. Without it no host can be named."""
    if _dog.timeout is None or _dog.peers or not hvd.is_initialized():
        return
    from hvd_ckpt.processes.hosts import Peer

    # An error is of use to nobody yet; the next collective raises it again.
    with contextlib.suppress(hvd.HorovodInternalError):
        _dog.peers = hvd.allgather_object(Peer.here(hvd.rank()), name="hvd_ckpt.processes.hosts")


def lost_hosts() -> str:
    """The hosts that do not answer, as the end of a sentence; empty if all do, or ranks are not connected. Takes 1.5 s at most."""
    if not _dog.peers:
        return ""
    from hvd_ckpt.processes.hosts import Peer, lost

    return lost(_dog.peers, Peer.here(_number() or 0))


def end(line: str) -> NoReturn:
    """Ends this process at once with status 1 and a line on stderr; nothing is run on the way out, for it could wait too."""
    saying = _say_in_background(line)
    if saying is not None:
        saying.join(SAYING_SECONDS)
    # Not sys.exit(): what runs at exit (Horovod's shutdown, MPI_Finalize) waits for the ranks that do not come.
    os._exit(1)


def _say_in_background(line: str) -> threading.Thread | None:
    """Prints a line from a thread, since a full pipe would keep this one; or at once where no thread starts any more."""
    saying = threading.Thread(target=_say, args=(line,), daemon=True)
    try:
        saying.start()
    except RuntimeError:  # from Python 3.12 on while the interpreter ends, which waits for Horovod's end
        _say(line)
        return None
    return saying


def _say(line: str) -> None:
    with contextlib.suppress(Exception):
        # Not through sys.stderr, whose lock another thread may hold.
        os.write(2, f"{line}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _install() -> None:
    """Puts a note of beginning and end around everything in Horovod that waits for other ranks."""
    # All of Horovod's synchronous calls, and synchronize(), end in `horovod_torch_wait_and_clear` of its C library, polls in
    # `horovod_torch_poll`. These are looked up in the library object for each call, so replacing them there is enough.
    basics, library = mpi_ops._basics, mpi_ops.mpi_lib
    start, stop, poll = basics.init, basics.shutdown, library.horovod_torch_poll

    def init(*args: Any, **kwargs: Any) -> None:
        with waiting("Horovod to start on all ranks", _time_for_hosts()):
            start(*args, **kwargs)
        _meet()

    def shutdown() -> None:
        for key in list(_dog.waits):
            if key < 0:
                del _dog.waits[key]
        with waiting("Horovod to end"):
            stop()
        _dog.peers, _dog.looks = [], ()  # which hold the links of the job

    def look(handle: int) -> Any:
        done, now, thread = poll(handle), _dog.now(), threading.get_ident()
        # A loop of polls waits although no single call does. So a handle counts as a wait while it is polled again and again,
        # unless the thread is known to wait.
        wait = _dog.waits.pop(~handle, None) or Wait(now, thread=thread)
        if not done and thread not in _dog.waits:
            _dog.waits[~handle] = wait._replace(until=now + POLL_LOOP_SECONDS)
        return done

    clear = library.horovod_torch_wait_and_clear

    def wait_and_clear(handle: int) -> None:
        _dog.waits.pop(~handle, None)
        with waiting():
            # Horovod's own looks without a pause, on a core that the thread which does the work may need.
            for _ in looks(handle, library):
                if poll(handle):
                    break
            clear(handle)

    basics.init, basics.shutdown, library.horovod_torch_poll = init, shutdown, look
    library.horovod_torch_wait_and_clear = wait_and_clear
    basics._add_process_set_impl = waiting("a process set to be added")(basics._add_process_set_impl)
    basics._remove_process_set_impl = waiting("a process set to be removed")(basics._remove_process_set_impl)


def _time_for_hosts() -> float:
    """Seconds that the start of an elastic job may take: until it has enough hosts, and until these have found each other. A rank
    whose peer dies meanwhile waits for it without a limit of Horovod's, and its launcher for the rank."""
    if not is_elastic():
        return 0.0
    return sum(
        float(os.environ.get(name, default))
        for name, default in (("HOROVOD_ELASTIC_TIMEOUT", "600"), ("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
    )


def _words_for(wait: Wait) -> str:
    frame = sys._current_frames().get(wait.thread)
    return waited_for([] if frame is None else traceback.walk_stack(frame), wait.what)


def waited_for(frames: Iterable[tuple[FrameType, int]], words: str) -> str:
    """What a stack waits for, and where the user's code called it.

    Args:
        frames: with their lines, the innermost first.
        words: what :func:`waiting` was told; by default the collective and its tensor.
    """
    operation = tensor = place = ""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES):
            place = f" at {Path(path).name}:{line}"
            break
        own_name = frame.f_code.co_name
        if path.endswith(("horovod/torch/mpi_ops.py", "horovod/torch/functions.py")) and hasattr(
            hvd, own_name
        ):
            operation = own_name if own_name not in ("synchronize", "poll") else operation
        name = frame.f_locals.get("name")
        if not tensor and isinstance(name, str) and name:
            tensor = f" '{name}'"
    return f"{words or (operation or 'a collective') + tensor}{place}"
