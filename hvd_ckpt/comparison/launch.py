"""Starts the jobs, watches them, and ends those that hang.

An engine's cells share one job, because starting one costs seconds. An error or a hang in one cell ends that job, since
its ranks are no longer in step, and a fresh one goes on with the cells that are left. A hang is a job of which no rank
has written an event (they write one per step) for a given time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.comparison.events import Event, EventReader
from hvd_ckpt.comparison.job import Job

__all__ = ["Failure", "Launcher", "Outcome"]

START_SECONDS = 180.0  # for imports and rendezvous, and for the processes to end, on a busy machine
GRACE_SECONDS = 10.0  # after an error on one rank, for the others to end by themselves
POLL_SECONDS = 0.1
WORKER = "hvd_ckpt.comparison.worker"
REFERENCE = "hvd_ckpt.comparison.reference"


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
    """Launches jobs on this machine.

    Args:
        controller: ``gloo`` or ``mpi``.
        timeout: seconds without an event after which a running job counts as hanging.
        environment: variables to set for the ranks, beyond those of this process.
        listener: called with each event as it arrives.
    """

    def __init__(
        self,
        controller: str,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        listener: Callable[[Event], object] = lambda event: None,
    ) -> None:
        self._controller = controller
        self._timeout = timeout
        binaries = str(Path(sys.executable).parent)
        path = os.pathsep.join(
            [binaries, os.environ.get("PATH", os.defpath)]
        )  # horovodrun looks for mpirun there
        self._environment = {**os.environ, "PATH": path, **(environment or {})}
        self._listener = listener

    def reference(self, job: Job) -> Outcome:
        """Compute the references of a job's workloads, in one process."""
        events, failure = self._launch(job, [sys.executable, "-m", REFERENCE, str(job.file)], 1)
        return Outcome(events, {"reference": failure} if failure else {})

    def train(self, job: Job) -> Outcome:
        """Train a job's cells, with a fresh start after each one that fails."""
        outcome = Outcome()
        left, starts = list(job.cells), 0
        while left:
            starts += 1
            folder = job.folder / f"start{starts}"
            part = dataclasses.replace(job, folder=folder, cells=tuple(left))
            horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", str(job.size)]
            command = [*horovodrun, f"--{self._controller}", sys.executable, "-m", WORKER, str(part.file)]
            events, failure = self._launch(part, command, job.size)
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

    def _launch(self, job: Job, command: list[str], processes: int) -> tuple[list[Event], Failure | None]:
        """Start one command and wait for its end, or for a reason to end it; returns its events and what failed."""
        job.save()
        reader = EventReader(job.folder)
        log_file = job.folder / "log.txt"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            events: list[Event] = []
            try:
                hang = self._watch(process, reader, processes, events)
            finally:
                _end(process, events)
        failure = None
        errors = [event for event in events if event["event"] == "error"]
        if hang:
            failure = Failure("hang", hang)
        elif errors:
            failure = Failure("error", f"{errors[0]['kind']}: {errors[0]['message']}")
        elif process.returncode != 0:
            words = f"the job ended with status {process.returncode}{_last_words(log_file)}"
            failure = Failure("error", words)
        return events, failure

    def _watch(
        self, process: subprocess.Popen[bytes], reader: EventReader, processes: int, events: list[Event]
    ) -> str:
        """Follow a job to its end; returns what hangs, or an empty string when it has ended by itself."""
        last = time.monotonic()
        failing = False
        while True:
            ended = process.poll() is not None
            new = reader.new()
            for event in new:
                self._listener(event)
            events += new
            if ended:
                return ""
            if new:
                last = time.monotonic()
            quiet = time.monotonic() - last
            failing = failing or any(event["event"] == "error" for event in new)
            if failing and quiet > GRACE_SECONDS:
                return ""
            training = _ranks(events, "ready") == processes and _ranks(events, "done") < processes
            limit = self._timeout if training else max(self._timeout, START_SECONDS)
            if quiet > limit:
                return f"no rank did a step for {limit:.0f} s; {_whereabouts(events)}"
            time.sleep(POLL_SECONDS)


def _ranks(events: list[Event], name: str) -> int:
    """How many ranks have written an event."""
    return len({event["rank"] for event in events if event["event"] == name})


def _finished(key: str, events: list[Event], size: int) -> bool:
    return _ranks([event for event in events if event.get("cell") == key], "finished") == size


def _whereabouts(events: list[Event]) -> str:
    """Where each rank was last seen, such as ``rank 0 after step 2, rank 1 after cell``."""
    last = {event["rank"]: event for event in events}
    if not last:
        return "no rank has started"
    places = [
        f"rank {rank} after {event['event']}" + (f" {event['step'] + 1}" if "step" in event else "")
        for rank, event in sorted(last.items())
    ]
    return ", ".join(places)


def _last_words(log_file: Path) -> str:
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


def _end(process: subprocess.Popen[bytes], events: list[Event]) -> None:
    """Make sure that a launcher and the ranks it started are gone."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    for event in events:
        if event["event"] == "born" and _is_ours(int(event["pid"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(event["pid"]), signal.SIGKILL)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ours(pid: int) -> bool:
    """Whether a process that once was a rank still is: its number may be another's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return WORKER.encode() in command or REFERENCE.encode() in command
