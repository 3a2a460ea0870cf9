"""One rank of an engine's job: trains the cells one after the other and writes what came out.

The first error ends the process, because the ranks are no longer in step then; the launcher starts a fresh one for the
cells that are left (see :mod:`.nursery`).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hvd_ckpt.bench.compare.catalog import make_workload
from hvd_ckpt.bench.compare.cells import Cell, find_variant
from hvd_ckpt.bench.compare.engines import Engine, find_engine, launched_rank_and_size
from hvd_ckpt.bench.compare.events import EventWriter
from hvd_ckpt.bench.compare.job import Job
from hvd_ckpt.bench.compare.planned import NoPlan, apply_plan, make_plan
from hvd_ckpt.bench.compare.reference import Reference, largest_difference
from hvd_ckpt.bench.compare.training import Trained, fingerprint, train
from hvd_ckpt.bench.compare.workloads import Workload
from hvd_ckpt.memory import recording_peak

__all__ = ["Worker", "work"]


class LeftOut(Exception):
    """The engine cannot train this by design; the message says why."""


Prepare = Callable[[nn.Module], object]


class Worker:
    """Trains the cells of a job on one rank."""

    def __init__(self, job: Job, engine: Engine, events: EventWriter) -> None:
        self._job = job
        self._engine = engine
        self._events = events
        self._device = torch.device(job.device)
        self._workloads: dict[str, Workload] = {
            name: make_workload(name, job.scale, job.seed, job.text) for name in job.workloads
        }
        self._references = {name: Reference.load(job.reference_file(name)) for name in job.workloads}

    def run(self) -> None:
        """Train every cell: twice with a close look, or once against the clock, as the job says."""
        for key in self._job.cells:
            self._events.write("cell", cell=key, small=self._is_small(Cell.from_key(key)))
            try:
                self._run(key)
            except (LeftOut, NoPlan) as error:
                self._events.write("left out", cell=key, reason=str(error))
            gc.collect()
            self._events.write("finished", cell=key)

    def _run(self, key: str) -> None:
        cell = Cell.from_key(key)
        refused = self._engine.refuses(self._workloads[cell.workload])
        if refused is not None:
            raise LeftOut(refused)
        if not self._job.checks:
            trained = self._train(key, self._planned(cell))
            self._events.write("timed", cell=key, seconds=trained.seconds, **self._hashes(trained))
            return
        trained = self._train(key, self._first_planned(cell))
        self._events.write("trained", cell=key, **self._outcome(key, trained), **_reductions(trained))
        del trained
        gc.collect()
        prepare = self._planned(cell)
        # The peak includes weights, gradients and optimizer: all that training allocates, from before the model is.
        with recording_peak(self._device) as memory:
            trained = self._train(key, prepare)
        self._events.write(
            "measured",
            cell=key,
            peak_bytes=memory.peak_bytes,
            **self._hashes(trained),
            **_reductions(trained),
        )

    def _is_small(self, cell: Cell) -> bool:
        """Whether milliseconds pass between two events; planning takes seconds."""
        return self._workloads[cell.workload].small and find_variant(cell.variant).budget is None

    def _first_planned(self, cell: Cell) -> Prepare:
        """What is done to the model of a cell's first training: where the cell wants it, it is planned."""
        budget = find_variant(cell.variant).budget
        if budget is None:
            return as_it_is
        return functools.partial(
            make_plan,
            workload=self._workloads[cell.workload],
            engine=self._engine,
            budget=budget,
            precision=self._job.precision,
            device=self._device,
            file=self._job.plan_file(cell.workload),
        )

    def _planned(self, cell: Cell) -> Prepare:
        """What is done to the model of each later training: it gets the plan of the first."""
        if find_variant(cell.variant).budget is None:
            return as_it_is
        return apply_plan(self._job.plan_file(cell.workload))

    def _train(self, key: str, prepare: Prepare) -> Trained:
        cell = Cell.from_key(key)
        return train(
            self._workloads[cell.workload],
            self._engine,
            cell,
            steps=self._job.steps,
            seed=self._job.seed,
            precision=self._job.precision,
            device=self._device,
            record_in=self._job.folder if self._job.checks else None,
            prepare=prepare,
            after_step=lambda step: self._events.write("step", cell=key, step=step),
        )

    def _hashes(self, trained: Trained) -> dict[str, str]:
        return {
            "weights": fingerprint(trained.parameters.items()),
            "buffers": fingerprint(trained.model.named_buffers()),
        }

    def _outcome(self, key: str, trained: Trained) -> dict[str, object]:
        """This rank's result beside the reference: hashes, differences, losses."""
        reference = self._references[Cell.from_key(key).workload]
        parameters = {name: tensor.cpu() for name, tensor in trained.parameters.items()}
        buffers = {name: tensor.detach().cpu() for name, tensor in trained.model.named_buffers()}
        names = ("difference", "relative", "worst")
        weights_apart = largest_difference(parameters, reference.parameters, reference.start)
        buffers_apart = largest_difference(buffers, reference.buffers[self._engine.rank], reference.start)
        return {
            **self._hashes(trained),
            **dict(zip(names, weights_apart, strict=True)),
            **{f"buffer_{name}": value for name, value in zip(names, buffers_apart, strict=True)},
            "losses": trained.losses,
        }


def work(job_file: Path) -> int:
    """Join the job's other ranks, train, leave; returns an exit status. An error is an event and a traceback in the log."""
    job = Job.load(job_file)
    os.environ.update(job.environment)
    rank, _ = launched_rank_and_size()
    with EventWriter(job.folder, rank) as events:
        events.write("born", pid=os.getpid())
        try:
            torch.use_deterministic_algorithms(True)
            engine = find_engine(job.engine)()
            engine.start(job.folder)
            if engine.size != job.size:
                raise RuntimeError(f"the job has {engine.size} ranks, {job.size} were asked for")
            worker = Worker(job, engine, events)
            events.write("ready", threads=torch.get_num_threads())
            worker.run()
            engine.stop()
            events.write("done")
        except Exception as error:
            events.write("error", kind=type(error).__name__, message=_first_line(error))
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    return 0


def as_it_is(model: nn.Module) -> None:
    """Does nothing to a model."""


def _reductions(trained: Trained) -> dict[str, object]:
    """What was recorded; without anything recorded (an engine of the user's own) nothing."""
    recording = trained.recording
    if recording is None or not recording.order:
        return {}
    return {"most": recording.most, "least": recording.least, "order": recording.digest()}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
