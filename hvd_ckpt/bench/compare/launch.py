"""Starts the jobs, watches them, and ends those that hang.

An engine's cells share one job. An error or a hang in one cell ends that job, since its ranks are no longer in step, and a
fresh one goes on with the cells that are left. A hang is a job of which no rank has written an event (they write one
per step) for a given time. The ranks come from a nursery (:mod:`.nursery`) that a launcher has started; where ranks join
through MPI, which a process can do only once, each start has a nursery of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hvd_ckpt.bench.compare.engines import find_engine
from hvd_ckpt.bench.compare.events import Event, EventReader
from hvd_ckpt.bench.compare.job import Job
from hvd_ckpt.bench.compare.nursery import CLOSE, start_file
from hvd_ckpt.probe import launcher_environment

__all__ = ["Failure", "Launcher", "Outcome"]

START_SECONDS = 180.0  # for imports and rendezvous, and for the processes to end, on a busy machine
GRACE_SECONDS = 1.0  # after an error on one rank, for the others to end by themselves
SMALL_SECONDS = 10.0  # without a step that takes milliseconds
POLL_SECONDS = 0.05
NURSERY = "hvd_ckpt.bench.compare.nursery"
REFERENCE = "hvd_ckpt.bench.compare.reference"


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result: ``kind`` is ``error`` or ``hang``, ``message`` one line."""

    kind: str
    message: str


@dataclass
class Outcome:
    """What a job gave with its fresh starts: the events of cells that all ranks finished, and the failures."""

    events: list[Event] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)


class Launcher:
    """Launches jobs on this machine; leaving its ``with`` statement ends every process that it started.

    Args:
        controller: ``gloo`` or ``mpi``.
        size: number of ranks.
        timeout: seconds without an event after which a running job counts as hanging.
        folder: where nurseries write.
        environment: variables to set for the ranks, beyond those of this process.
    """

    def __init__(
        self,
        controller: str,
        size: int,
        timeout: float,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._controller = controller
        self._size = size
        self._timeout = timeout
        self._folder = folder
        self._environment = {**launcher_environment(), **(environment or {})}
        self._rendezvous = _Rendezvous(size) if controller == "gloo" else None
        self._nurseries = 0
        self._nursery: _Process | None = None

    def __enter__(self) -> Launcher:
        self._open_nursery()  # its imports take as long as the reference does
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_nursery()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def reference(self, job: Job, listener: Callable[[Event], object] = lambda event: None) -> Outcome:
        """Compute the references of a job's workloads, in one process."""
        job.save()
        command = [sys.executable, "-m", REFERENCE, str(job.file)]
        watch = _Watch(job.folder, 1, self._timeout, listener)
        with contextlib.closing(_Process(command, job.folder, self._environment)) as process:
            failure = watch.follow(process, ended=lambda: False)
            watch.kill()
        return Outcome(watch.events, {"reference": failure} if failure else {})

    def train(self, job: Job, listener: Callable[[Event], object] = lambda event: None) -> Outcome:
        """Train a job's cells, with a fresh start after each one that fails."""
        outcome = Outcome()
        left, starts = list(job.cells), 0
        while left:
            starts += 1
            part = dataclasses.replace(job, folder=job.folder / f"start{starts}", cells=tuple(left))
            events, failure = self._start(part, listener)
            finished = {key for key in left if _finished(key, events, job.size)}
            outcome.events += [event for event in events if event.get("cell") in finished]
            if failure is None:
                break
            if _ranks(events, "ready") == 0:  # a fresh start would fail the same way
                outcome.failures.update(dict.fromkeys(left, failure))
                break
            unfinished = [key for key in left if key not in finished]
            failed = unfinished[0] if unfinished else left[-1]  # the last: the job did not end as it should
            outcome.failures[failed] = failure
            left = unfinished[1:]
        return outcome

    def _start(self, job: Job, listener: Callable[[Event], object]) -> tuple[list[Event], Failure | None]:
        """Start the ranks of one job, and wait for their end or for a reason to end them."""
        environment = {**job.environment}
        if job.checks:
            environment["HOROVOD_TIMELINE"] = "DYNAMIC"  # so that a timeline can be started later
        if self._rendezvous is not None:
            environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] = self._rendezvous.renew()
        job = dataclasses.replace(job, environment=environment)
        job.save()
        nursery = (
            self._nursery if self._nursery is not None and self._nursery.is_alive() else self._open_nursery()
        )
        nursery.ask(job)
        watch = _Watch(job.folder, job.size, self._timeout, listener)
        try:
            failure = watch.follow(nursery, ended=lambda: _ranks(watch.events, "ended") == job.size)
        except BaseException:
            watch.kill()
            raise
        joins_once = self._controller == "mpi" and find_engine(job.engine).uses_horovod
        if failure is not None:
            watch.kill()
            watch.wait(nursery)
        if joins_once or _ranks(watch.events, "ended") < job.size:
            self._close_nursery()
        return watch.events, failure

    def _open_nursery(self) -> _Process:
        self._close_nursery()
        self._nurseries += 1
        folder = self._folder / f"ranks{self._nurseries}"
        horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", str(self._size)]
        command = [*horovodrun, f"--{self._controller}", sys.executable, "-m", NURSERY, str(folder)]
        self._nursery = _Process(command, folder, self._environment)
        return self._nursery

    def _close_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


class _Rendezvous:
    """Where Horovod's ranks find each other over Gloo. horovodrun has one for the first start; each further start
    needs one that remembers nothing."""

    def __init__(self, size: int) -> None:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self._plan = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
        self._server = RendezvousServer()
        self._port = str(self._server.start())

    def renew(self) -> str:
        """Forget every rank; returns the port."""
        self._server.init(self._plan)
        return self._port

    def close(self) -> None:
        self._server.stop()


class _Process:
    """A command that runs in the background: a launcher with its ranks in waiting, or the reference."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._starts = 0
        self._log_file = folder / "log.txt"
        self._log_read = 0
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.status is None

    def ask(self, job: Job) -> None:
        """Ask for the ranks of a job."""
        self._starts += 1
        self._log_read = self._log_file.stat().st_size
        file = start_file(self._folder, self._starts)
        written = file.with_suffix(".tmp")
        written.write_text(json.dumps({"job": str(job.file)}) + "\n")
        written.rename(file)

    def last_words(self) -> str:
        """The last line of the log since the last start."""
        text = self._log_file.read_bytes()[self._log_read :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """Make sure that the command and what it started are gone."""
        (self._folder / CLOSE).touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=3)
        _kill(EventReader(self._folder).new())
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class _Watch:
    """Follows the events of one job."""

    def __init__(self, folder: Path, ranks: int, timeout: float, listener: Callable[[Event], object]) -> None:
        self.events: list[Event] = []
        self._reader = EventReader(folder)
        self._ranks = ranks
        self._timeout = timeout
        self._listener = listener

    def follow(self, process: _Process, ended: Callable[[], bool]) -> Failure | None:
        """Follow the job to its end, or to a reason to end it; returns what went wrong."""
        last = time.monotonic()
        failing = False
        while True:
            over = process.status is not None
            new = self._read()
            if new:
                last = time.monotonic()
            quiet = time.monotonic() - last
            failing = failing or any(_is_bad(event) for event in new)
            if over or ended() or (failing and quiet > GRACE_SECONDS):
                return self._failure(process, over)
            if not failing and quiet > self._limit():
                return Failure(
                    "hang", f"no rank did a step for {self._limit():.0f} s; {_whereabouts(self.events)}"
                )
            time.sleep(POLL_SECONDS)

    def wait(self, process: _Process, seconds: float = 5.0) -> None:
        """Wait until the nursery has seen the end of all ranks, for a while."""
        limit = time.monotonic() + seconds
        while process.is_alive() and _ranks(self.events, "ended") < self._ranks and time.monotonic() < limit:
            self._read()
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End the ranks, whatever they do."""
        self._read()
        _kill(self.events)

    def _read(self) -> list[Event]:
        new = self._reader.new()
        for event in new:
            self._listener(event)
        self.events += new
        return new

    def _limit(self) -> float:
        """How long all ranks may be silent now."""
        training = _ranks(self.events, "ready") == self._ranks and _ranks(self.events, "done") < self._ranks
        if not training:
            return max(self._timeout, START_SECONDS)
        cells = [event for event in self.events if event["event"] == "cell"]
        return min(self._timeout, SMALL_SECONDS) if cells and cells[-1].get("small") else self._timeout

    def _failure(self, process: _Process, over: bool) -> Failure | None:
        for event in self.events:
            if event["event"] == "error":
                return Failure("error", f"{event['kind']}: {event['message']}")
        status = next(
            (event["status"] for event in self.events if _is_bad(event)), process.status if over else 0
        )
        if over and not status and _ranks(self.events, "done") < self._ranks:
            return Failure("error", f"the job ended before its ranks were done{process.last_words()}")
        if status:
            return Failure("error", f"a rank ended with status {status}{process.last_words()}")
        return None


def _is_bad(event: Event) -> bool:
    return event["event"] == "error" or bool(event["event"] == "ended" and event["status"])


def _ranks(events: Sequence[Event], name: str) -> int:
    """How many ranks have written an event."""
    return len({event["rank"] for event in events if event["event"] == name})


def _finished(key: str, events: Sequence[Event], size: int) -> bool:
    return _ranks([event for event in events if event.get("cell") == key], "finished") == size


def _whereabouts(events: Sequence[Event]) -> str:
    """Where each rank was last seen, such as ``rank 0 after step 2, rank 1 after cell``."""
    last = {event["rank"]: event for event in events}
    if not last:
        return "no rank has started"
    places = [
        f"rank {rank} after {event['event']}" + (f" {event['step'] + 1}" if "step" in event else "")
        for rank, event in sorted(last.items())
    ]
    return ", ".join(places)


def _kill(events: Sequence[Event]) -> None:
    """End the processes that wrote in these events who they are."""
    for event in events:
        if "pid" in event and _is_ours(int(event["pid"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(event["pid"]), signal.SIGKILL)


def _is_ours(pid: int) -> bool:
    """Whether a process that once was a rank still is: its number may be another's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return NURSERY.encode() in command or REFERENCE.encode() in command
