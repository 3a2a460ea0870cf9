"""Starts the ranks of jobs, watches them, and ends those that hang.

An engine's cells share one job. An error or a hang in one cell ends that job, since its ranks are no longer in step, and a fresh
one continues with the cells that are left. A hang is a job of which no rank has written an event (they write one per step) for
a given time.

Importing PyTorch, Horovod and Transformers takes seconds, a fork takes milliseconds. So ranks are forked by
:mod:`multiprocessing`'s fork server, which has imported everything, with the variables that ``horovodrun --gloo`` sets. A process
can join through MPI only under ``mpirun``, so an engine that does is started with ``horovodrun --mpi`` each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.forkserver
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from horovod.runner.http.http_server import RendezvousServer

from hvd_ckpt.app.compare.cells import Cell
from hvd_ckpt.app.compare.runner import jobs
from hvd_ckpt.app.compare.runner.engines import find_engine
from hvd_ckpt.app.compare.worker import REFERENCE, EngineJob, Figures, run_process
from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.rendezvous import rank_variables

START_SECONDS = 180.0  # for imports and rendezvous, and for the processes to end, on a busy machine
GRACE_SECONDS = 0.5  # after an error on one rank, for the others to end by themselves
SMALL_SECONDS = 6.0  # without a step that takes milliseconds
POLL_SECONDS = 0.05
WORKER = "hvd_ckpt.app.compare.worker"
IMPORTED = [
    *(WORKER, "hvd_ckpt.app.models.bert", "hvd_ckpt.app.models.densenet"),
    *("sklearn.datasets", "hvd_ckpt", "horovod.torch"),
]
"""Modules that ranks need, where they are installed; a rank that misses one says so itself."""

Event = dict[str, Any]
Listener = Callable[[Event], object]


class EventReader:
    """Reads the events that the ranks of one job have written since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """New events of all ranks, oldest first; a line that is not finished yet waits for the next call."""
        events: list[Event] = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as stream:
                stream.seek(self._read.get(path, 0))
                text = stream.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            events += [json.loads(line) for line in complete.splitlines()]
        return sorted(events, key=lambda event: float(event["time"]))


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result: ``kind`` is ``error`` or ``hang``, ``message`` one line."""

    kind: str
    message: str


Trainings = list[list[Figures]]
"""For each training of a cell, the figures of each rank."""


class Launcher:
    """Launches jobs on this machine.

    Args:
        controller: ``gloo`` or ``mpi``.
        size: number of ranks.
        timeout: seconds without an event after which a running job counts as hanging.
        threads: CPU threads of each rank.
    """

    def __init__(self, controller: str, size: int, timeout: float, threads: int) -> None:
        self._controller, self._size, self._timeout = controller, size, timeout
        self._environment = jobs.rank_environment(threads)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)

    def __enter__(self) -> Launcher:
        with mock.patch.dict("os.environ", self._environment):  # such as the number of threads
            multiprocessing.forkserver.ensure_running()
        self._server = RendezvousServer()
        interfaces = psutil.net_if_addrs()
        loopback = next(
            name for name in interfaces if "127.0.0.1" in {entry.address for entry in interfaces[name]}
        )
        over = {"HOROVOD_GLOO_IFACE": loopback, "NCCL_SOCKET_IFNAME": loopback, "HOROVOD_CONTROLLER": "gloo"}
        ranks = rank_variables(["localhost"] * self._size, "127.0.0.1", self._server.start())
        self._variables = [{"HOROVOD_CPU_OPERATIONS": "gloo", **over, **own} for own in ranks]
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def train(self, job: EngineJob, listener: Listener) -> dict[Cell, Trainings | Failure]:
        """Trains a job's cells, with a fresh start after each one that fails."""
        found: dict[Cell, Trainings | Failure] = {}
        left, starts = list(job.cells), 0
        while left:
            starts += 1
            part = dataclasses.replace(job, folder=job.folder / f"start{starts}", cells=tuple(left))
            events, failure = self.start(part, listener)
            for cell in part.cells:
                told = {event["rank"]: event for event in events if event.get("cell") == cell.key}
                if [event["event"] for event in told.values()] == ["result"] * job.size:
                    each = [told[rank]["trainings"] for rank in range(job.size)]
                    found[cell] = [list(ranks) for ranks in zip(*each)]
            if failure is None:
                break
            # Ranks train cells in order, so the first unfinished one has failed. If all are finished, the job did not end as it
            # should, which counts against the last. If no rank got as far as its cells, a fresh start would fail in the same way.
            unfinished = [cell for cell in left if cell not in found]
            failed = (unfinished or left[-1:])[: 1 if _ranks(events, "ready") else None]
            found |= dict.fromkeys(failed, failure)
            left = unfinished[len(failed) :]
        return found

    def start(self, job: EngineJob, listener: Listener) -> tuple[list[Event], Failure | None]:
        """Starts the processes of a job, and follows them to their end; returns their events and what went wrong."""
        job.save()
        # MPI can be joined once in the life of a process, and only under mpirun, so a fork will not do.
        if self._controller == "mpi" and job.engine != REFERENCE and find_engine(job.engine).uses_horovod:
            command = jobs.launch_command(job.size, "mpi", WORKER, job.file)
            return self._follow(_Launched(command, job.log_file, self._environment), job, listener)
        # Ranks of an earlier start have left their addresses in the server, and new ones would connect to those.
        self._server.init([])
        each = self._variables[: job.processes]
        processes = [self._context.Process(target=run_process, args=(str(job.file), own)) for own in each]
        return self._follow(_Forked(processes), job, listener)

    def _follow(
        self, ranks: _Forked | _Launched, job: EngineJob, listener: Listener
    ) -> tuple[list[Event], Failure | None]:
        """Follows ranks to their end, or to a reason to end them."""
        reader, events = EventReader(job.folder), list[Event]()
        last, failing = time.monotonic(), False
        with contextlib.closing(ranks):
            while True:
                # Before the events are read: what a rank wrote just before its end would be missed otherwise.
                ended, status = ranks.poll()
                new = reader.new()
                for event in new:
                    listener(event)
                events += new
                if new:
                    last = time.monotonic()
                quiet = time.monotonic() - last
                failing = failing or status != 0 or any(event["event"] == "error" for event in new)
                # One rank's error leaves the others waiting in a collective. They get a moment to say what went wrong for them.
                if ended or (failing and quiet > GRACE_SECONDS):
                    return events, _failure(events, job, status)
                limit = self._limit(events, job.processes)
                if not failing and quiet > limit:
                    message = f"no rank did a step for {limit:.0f} s; {_whereabouts(events)}"
                    return events, Failure("hang", message)
                time.sleep(POLL_SECONDS)

    def _limit(self, events: Sequence[Event], size: int) -> float:
        """How long all ranks may be silent now."""
        # Imports and rendezvous take long on a busy machine, and so may the end of processes; nothing is a hang there.
        if _ranks(events, "ready") < size or _ranks(events, "done") == size:
            return max(self._timeout, START_SECONDS)
        return min(self._timeout, SMALL_SECONDS) if events[-1].get("small") else self._timeout


class _Forked:
    """Ranks from the fork server."""

    def __init__(self, processes: Sequence[ForkServerProcess]) -> None:
        self._processes = processes
        for process in processes:
            process.start()

    def poll(self) -> tuple[bool, int]:
        """Whether all have ended, and the exit status of one that failed, else 0."""
        statuses = [process.exitcode for process in self._processes]
        return None not in statuses, next((status for status in statuses if status), 0)

    def close(self) -> None:
        """Ends those that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class _Launched(Process):
    """Ranks of a launcher."""

    def poll(self) -> tuple[bool, int]:
        """Whether the launcher has ended, and its exit status or 0."""
        return self.status is not None, self.status or 0


def _failure(events: Sequence[Event], job: EngineJob, status: int) -> Failure | None:
    # The first error by its time is the cause. Other ranks fail after it, in collectives that it has left.
    for event in events:
        if event["event"] == "error":
            return Failure("error", event["message"])
    if status:
        return Failure("error", f"a rank ended with status {status}: {error_line(job.log_file)}")
    if _ranks(events, "done") < job.processes:
        return Failure("error", f"the ranks ended before they were done: {error_line(job.log_file)}")
    return None


def _ranks(events: Sequence[Event], name: str) -> int:
    """How many ranks have written an event."""
    return len({event["rank"] for event in events if event["event"] == name})


def _whereabouts(events: Sequence[Event]) -> str:
    """The last event of each rank, such as ``rank 0 after step 2, rank 1 after ready``."""
    last = {event["rank"]: event for event in events}
    places = [
        f"rank {rank} after {event['event']}" + (f" {event['step']}" if "step" in event else "")
        for rank, event in sorted(last.items())
    ]
    return ", ".join(places) or "no rank has started"
