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
import functools
import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from unittest import mock

import psutil
from horovod.runner.http.http_server import RendezvousServer

from hvd_ckpt.app.compare.cells import Cell
from hvd_ckpt.app.compare.runner import jobs
from hvd_ckpt.app.compare.runner.engines import find_engine
from hvd_ckpt.app.compare.runner.jobs import Event, JobError, follow, ranks_at
from hvd_ckpt.app.compare.runner.rank import run_rank
from hvd_ckpt.app.compare.worker import EngineJob, Figures
from hvd_ckpt.processes.commands import Process
from hvd_ckpt.processes.rendezvous import rank_variables

START_SECONDS = 180.0  # for imports and rendezvous, and for the processes to end, on a busy machine
SMALL_SECONDS = 6.0  # without a step that takes milliseconds
IMPORTED = [
    *("hvd_ckpt.app.compare.worker", "hvd_ckpt.app.models.transformer", "hvd_ckpt.app.models.densenet"),
    *("sklearn.datasets", "hvd_ckpt", "horovod.torch"),
]
"""Modules that ranks need, where they are installed; a rank that misses one says so itself."""

Listener = Callable[[Event], object]
Trainings = list[list[Figures]]
"""For each training of a cell, the figures of each rank."""


class Launcher:
    """Launches jobs on this machine.

    Args:
        timeout: seconds without an event after which a running job counts as hanging.
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

    def train(self, job: EngineJob, listener: Listener) -> dict[Cell, Trainings | JobError]:
        """Trains a job's cells, with a fresh start after each one that fails."""
        found: dict[Cell, Trainings | JobError] = {}
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
            failed = (unfinished or left[-1:])[: 1 if ranks_at(events, "ready") else None]
            found |= dict.fromkeys(failed, failure)
            left = unfinished[len(failed) :]
        return found

    def start(self, job: EngineJob, listener: Listener) -> tuple[list[Event], JobError | None]:
        """Starts the processes of a job, and follows them to their end; returns their events and what went wrong."""
        job.save()
        limit = functools.partial(self._limit, job.size)
        # MPI can be joined once in the life of a process, and only under mpirun, so a fork will not do.
        if self._controller == "mpi" and find_engine(job.engine).uses_horovod:
            command = jobs.launch_command(job.size, "mpi", jobs.RANK, job.worker, job.file)
            with Process(command, job.log_file, self._environment) as process:
                return follow(lambda: [process.status], job, limit, listener)
        with self._forked(job) as processes:
            return follow(lambda: [process.exitcode for process in processes], job, limit, listener)

    @contextlib.contextmanager
    def _forked(self, job: EngineJob) -> Iterator[Sequence[ForkServerProcess]]:
        """The ranks of a job from the fork server, which are ended if they still run."""
        # Ranks of an earlier start have left their addresses in the server, and new ones would connect to those.
        self._server.init([])
        each = [(job.worker, job.file, own) for own in self._variables[: job.size]]
        processes = [self._context.Process(target=run_rank, args=arguments) for arguments in each]
        try:
            for process in processes:
                process.start()
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()

    def _limit(self, size: int, events: Sequence[Event]) -> float:
        """How long all ranks may be silent now."""
        # Imports and rendezvous take long on a busy machine, and so may the end of processes; nothing is a hang there.
        if ranks_at(events, "ready") < size or ranks_at(events, "done") == size:
            return max(self._timeout, START_SECONDS)
        return min(self._timeout, SMALL_SECONDS) if events[-1].get("small") else self._timeout
