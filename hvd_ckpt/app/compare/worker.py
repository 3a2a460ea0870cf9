"""One rank of an engine's job: trains the cells one after the other and writes the results as events; and the reference's process.

Events are JSON lines in one file per rank, which the launcher reads while they grow: they say what the rank does now, so that
slow can be told from stuck. An infinite difference or an undefined loss travels as text, which ``float()`` reads.

The first error ends the process, because the ranks are no longer in step then; the launcher starts a fresh one for the cells
that are left (see :mod:`.launch`).
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from hvd_ckpt.app.compare.catalog import make_workload
from hvd_ckpt.app.compare.cells import Cell, Settings, find_variant
from hvd_ckpt.app.compare.reference import Reference, largest_difference, make_reference, mean_losses
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import start_engine
from hvd_ckpt.app.compare.runner.jobs import RankJob, launched_rank_and_size, load_json, own_device
from hvd_ckpt.app.compare.runner.report import plain
from hvd_ckpt.app.compare.training import AUTOCAST, Trained, fingerprint, train
from hvd_ckpt.app.compare.workloads import Workload
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.utils.extras import first_line
from hvd_ckpt.utils.memory import recording_peak

REFERENCE = "reference"  # in place of an engine: one process computes the references


@dataclass(frozen=True)
class Job(RankJob):
    """One launch: which engine trains which cells, and how.

    Attributes:
        references: the folder of the references, one file per workload, and of the plans.
        engine: a name in the registry of engines, ``module:Class``, or :data:`REFERENCE`.
        cells: in the order in which they are trained.
        settings: of each training run.
        checks: each cell is trained twice, with its reductions recorded, and the second time its memory; otherwise
            once, with nothing that takes time.
    """

    references: Path
    engine: str
    cells: tuple[Cell, ...]
    settings: Settings
    checks: bool

    @property
    def workloads(self) -> list[str]:
        """The workloads of the cells, each once, in order."""
        return list(dict.fromkeys(cell.workload for cell in self.cells))

    def reference_file(self, workload: str) -> Path:
        """The reference of a workload."""
        return self.references / f"reference-{workload}.pt"

    def plan_file(self, workload: str) -> Path:
        """The plan of a workload, for the engine's later jobs."""
        return self.references / f"plan-{folder_name(self.engine)}-{workload}.json"


def folder_name(engine: str) -> str:
    """An engine's name as a file system takes it."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in engine)


class EventWriter:
    """Appends a rank's events to ``rank<rank>.jsonl`` in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "rank": self._rank, "time": time.time(), **values}
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class LeftOut(Exception):
    """A cell that is not trained: the engine refuses it by design, or no plan stays within the budget. The message says why."""


class Worker:
    """Trains the cells of a job on one rank."""

    def __init__(self, job: Job, engine: Engine, events: EventWriter) -> None:
        self._job = job
        self._engine = engine
        self._events = events
        self._settings = job.settings
        self._workloads: dict[str, Workload] = {
            name: make_workload(name, job.settings) for name in job.workloads
        }
        self._references = {name: Reference.load(job.reference_file(name)) for name in job.workloads}

    def run(self) -> None:
        """Trains every cell: twice with a close look, or once against the clock, as the job says."""
        for cell in self._job.cells:
            planned = find_variant(cell.variant).budget is not None
            # Whether milliseconds pass between two events; planning takes seconds.
            self._events.write(
                "cell", cell=cell.key, small=self._workloads[cell.workload].small and not planned
            )
            try:
                self._run(cell)
            except LeftOut as reason:
                self._events.write("left out", cell=cell.key, reason=str(reason))
            gc.collect()
            self._events.write("finished", cell=cell.key)

    def _run(self, cell: Cell) -> None:
        refused = self._engine.refuses(self._workloads[cell.workload])
        if refused is not None:
            raise LeftOut(refused)
        if not self._job.checks:
            trained = self._train(cell)
            self._events.write("timed", cell=cell.key, seconds=trained.seconds, **_hashes(trained))
            return
        trained = self._train(cell, first=True)
        self._events.write("trained", cell=cell.key, **self._outcome(cell, trained), **_reductions(trained))
        # The second run must not find the first one's memory in use.
        del trained
        gc.collect()
        # The peak includes weights, gradients and optimizer: all that training allocates, from before the model is made.
        with recording_peak(self._settings.device) as memory:
            trained = self._train(cell)
        values = {**_hashes(trained), **_reductions(trained)}
        self._events.write("measured", cell=cell.key, peak_bytes=memory.peak_bytes, **values)

    def _train(self, cell: Cell, first: bool = False) -> Trained:
        return train(
            self._workloads[cell.workload],
            self._engine,
            cell,
            self._settings,
            record_in=self._job.folder if self._job.checks else None,
            prepare=self._plan(cell, first),
            after_step=lambda step: self._events.write("step", cell=cell.key, step=step),
        )

    def _plan(self, cell: Cell, first: bool) -> Callable[[nn.Module], object]:
        """The preparation of a model: where the cell has a budget, the first training plans, and later ones read that plan.

        So a plan that leaves a trace in the model, or that does not survive its file, shows up as weights that are off or runs that
        differ.
        """
        budget = find_variant(cell.variant).budget
        if budget is None:
            return lambda model: None
        file = self._job.plan_file(cell.workload)
        if not first:
            return Plan.load(file).apply
        engine, workload = self._engine, self._workloads[cell.workload]

        def prepare(model: nn.Module) -> None:
            """Plans for each rank's first batch on the model that is about to be trained, wrapped and all."""
            batch = workload.batches(engine.rank, engine.size, 0)[0].to(torch.device(self._settings.device))
            options = {
                "kwargs": batch.shared,
                "loss": lambda output: workload.loss(output, batch.targets),
                "autocast": AUTOCAST.get(self._settings.precision),
            }
            try:
                plan = engine.plan(model, *batch.inputs, budget=budget, **options)
            except ValueError as error:  # on every rank
                raise LeftOut(str(error)) from error
            if engine.rank == 0:
                plan.save(file)
            plan.apply(model)

        return prepare

    def _outcome(self, cell: Cell, trained: Trained) -> dict[str, object]:
        """This rank's result beside the reference: hashes, differences, losses."""
        reference = self._references[cell.workload]
        parameters = {name: tensor.cpu() for name, tensor in trained.parameters.items()}
        buffers = {name: tensor.detach().cpu() for name, tensor in trained.model.named_buffers()}
        expected = reference.parameters, reference.buffers[self._engine.rank]
        # Each rank has a stage, a part of the model. Elsewhere a tensor that is missing is an error.
        if self._workloads[cell.workload].staged:
            expected = _named_in(expected[0], parameters), _named_in(expected[1], buffers)
        names = ("difference", "relative", "worst")
        weights_apart = largest_difference(parameters, expected[0], reference.start)
        buffers_apart = largest_difference(buffers, expected[1], reference.start)
        return {
            **_hashes(trained),
            **dict(zip(names, weights_apart, strict=True)),
            **{f"buffer_{name}": value for name, value in zip(names, buffers_apart, strict=True)},
            "losses": trained.losses,
        }


def _named_in(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in expected.items() if name in found}


def _hashes(trained: Trained) -> dict[str, str]:
    return {
        "weights": fingerprint(trained.parameters.items()),
        "buffers": fingerprint(trained.model.named_buffers()),
    }


def _reductions(trained: Trained) -> dict[str, object]:
    """The recording; without anything recorded (an engine of the user's own) nothing."""
    recording = trained.recording
    if recording is None or not recording.order:
        return {}
    return {"most": recording.most, "least": recording.least, "order": recording.digest()}


def work(job: Job) -> int:
    """One process of a job; returns an exit status. An error is an event and a traceback in the log."""
    if job.checks:
        # Horovod reads this when it starts; without it no timeline can be started later.
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    computes = job.engine == REFERENCE
    rank = 0 if computes else launched_rank_and_size()[0]
    with EventWriter(job.folder, rank) as events:
        events.write("born", pid=os.getpid())
        try:
            use_deterministic_kernels()
            (compute_references if computes else train_cells)(job, events)
            events.write("done")
        except Exception as error:
            events.write("error", kind=type(error).__name__, message=first_line(error))
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    return 0


def train_cells(job: Job, events: EventWriter) -> None:
    """Joins the job's other ranks, trains, leaves."""
    engine = start_engine(job.engine, job, own_device(job.settings.device))
    worker = Worker(job, engine, events)
    events.write("ready")
    worker.run()
    engine.stop()


def compute_references(job: Job, events: EventWriter) -> None:
    """Computes the references of every workload in a job."""
    workloads = {name: make_workload(name, job.settings) for name in job.workloads}
    events.write("ready")
    for name, workload in workloads.items():
        size = 1 if workload.staged else job.size
        reference = make_reference(workload, size, job.settings, lambda step: events.write("step", step=step))
        reference.save(job.reference_file(name))
        events.write(
            "reference",
            workload=name,
            layers=reference.layers,
            losses=mean_losses(reference.losses),
            line=workload.model_line,
        )


def run_forked(job_file: str, variables: dict[str, str]) -> None:
    """A process of the fork server, with the variables that a launcher of ranks would set."""
    job = load_json(Job, Path(job_file))
    _begin(job)
    os.environ.update(variables)
    _end(work(job))


def _begin(job: Job) -> None:
    """Sends the output of this process to the job's log."""
    gc.freeze()  # objects that the imports left behind need no collection in a rank
    with job.log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _end(status: int) -> None:
    """Ends a process that the fork server would end without its exit functions, among them Horovod's shutdown."""
    if status == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # after an error, a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    _status = work(load_json(Job, Path(sys.argv[1])))
    if _status:
        os._exit(_status)
