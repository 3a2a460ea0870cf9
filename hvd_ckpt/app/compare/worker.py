"""One rank of an engine's job: trains the cells one after the other and tells what it does; and the reference's process.

Each rank has a file of events, which the launcher reads while it grows, so that slow can be told from stuck: JSON lines with the
rank, the time, and what happened. An infinite difference or an undefined loss travels as text, which ``float()`` reads.

    born (pid)                  ready                       done        of the process
    step (cell, step)           this many steps are done; 0 where a training begins
    result (cell, trainings)    the figures of each training of a cell
    reference (workload, title, line, layers, losses, small)
    error (message)             of this rank; it ends the process

Events of cells also tell whether a step takes milliseconds: ``small``.

The first error ends the process, because the ranks are no longer in step then (see :mod:`.launch`).
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ckpt.app.compare import scenarios  # noqa: F401  # whose classes enter the catalogue
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.reference import Reference, apart, make_reference
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import start_engine
from hvd_ckpt.app.compare.runner.jobs import RankJob, launched_rank_and_size, load_json, own_device, reason
from hvd_ckpt.app.compare.runner.report import plain
from hvd_ckpt.app.compare.training import Training, fingerprint, train
from hvd_ckpt.app.compare.workloads import make_workload
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.utils.memory import recording_peak

REFERENCE = "reference"  # in place of an engine: one process computes the references

Figures = dict[str, Any]


@dataclass(frozen=True)
class EngineJob(RankJob):
    """One launch: which engine trains which cells, and how.

    Attributes:
        references: the folder of the references, one file per workload.
        engine: a name in the registry of engines, ``module:Class``, or :data:`REFERENCE`.
        cells: in the order in which they are trained.
        settings: of each training run.
        checks: each cell is trained twice, with its reductions recorded, and the second time its memory; otherwise
            once, with nothing that takes time.
    """

    references: Path
    engine: str
    cells: tuple[Cell, ...]
    settings: TrainingSettings
    checks: bool

    @property
    def processes(self) -> int:
        """How many are started."""
        return 1 if self.engine == REFERENCE else self.size

    @property
    def workloads(self) -> list[str]:
        """The workloads of the cells, each once, in order."""
        return list(dict.fromkeys(cell.workload for cell in self.cells))

    def reference_file(self, workload: str) -> Path:
        """The reference of a workload."""
        return self.references / f"reference-{workload}.pt"


class Events:
    """Appends a rank's events to ``rank<rank>.jsonl`` in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank, self._file = rank, folder / f"rank{rank}.jsonl"

    def tell(self, event: str, **values: Any) -> None:
        line = {"event": event, "rank": self._rank, "time": time.time(), **values}
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(plain(line), allow_nan=False) + "\n")


class Worker:
    """Trains the cells of a job on one rank."""

    def __init__(self, job: EngineJob, engine: Engine, events: Events) -> None:
        self._job, self._engine, self._events = job, engine, events
        self._workloads = {name: make_workload(name, job.settings) for name in job.workloads}
        self._references = {name: Reference.load(job.reference_file(name)) for name in job.workloads}

    def run(self) -> None:
        """Trains every cell: twice with a close look, or once against the clock, as the job says."""
        for cell in self._job.cells:
            self._tell(cell, "result", trainings=self._trainings(cell))
            gc.collect()

    def _trainings(self, cell: Cell) -> list[Figures]:
        trained = self._train(cell)
        if not self._job.checks:
            return [_figures(trained, seconds=trained.seconds)]
        distance = apart(self._references[cell.workload], trained, self._engine.rank)
        first = _figures(trained, **distance)
        # The second run must not find the first one's memory in use.
        del trained
        gc.collect()
        # The peak includes weights, gradients and optimizer: all that training allocates, from before the model is made.
        with recording_peak(self._job.settings.device) as memory:
            trained = self._train(cell)
        return [first, _figures(trained, peak_bytes=memory.peak_bytes)]

    def _train(self, cell: Cell) -> Training:
        self._tell(cell, "step", step=0)
        return train(
            self._workloads[cell.workload],
            self._engine,
            cell,
            self._job.settings,
            record_in=self._job.folder if self._job.checks else None,
            after_step=lambda step: self._tell(cell, "step", step=step + 1),
        )

    def _tell(self, cell: Cell, event: str, **values: Any) -> None:
        self._events.tell(event, cell=cell.key, small=self._workloads[cell.workload].small, **values)


def _figures(trained: Training, **more: Any) -> Figures:
    """Hashes of a training's result, and its reductions where any were recorded (of an engine of the user's own, none are)."""
    figures = {
        "weights": fingerprint(trained.parameters.items()),
        "buffers": fingerprint(trained.model.named_buffers()),
        **more,
    }
    recording = trained.recording
    if recording is not None and recording.order:
        figures |= {"most": recording.most, "least": recording.least, "order": recording.digest()}
    return figures


def run_process(job_file: str, variables: Mapping[str, str] | None = None) -> None:
    """One process of a job. An error is an event, and a traceback in the log.

    Args:
        variables: for a process of the fork server, those that a launcher of ranks would set; a launcher also writes the log.
    """
    job = load_json(EngineJob, Path(job_file))
    gc.freeze()  # objects that the imports left behind need no collection in a rank
    if variables is not None:
        os.environ.update(variables)
        with job.log_file.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    if job.checks:
        # Horovod reads this when it starts; without it no timeline can be started later.
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    computes, status = job.engine == REFERENCE, 0
    events = Events(job.folder, 0 if computes else launched_rank_and_size()[0])
    events.tell("born", pid=os.getpid())
    try:
        use_deterministic_kernels()
        (compute_references if computes else train_cells)(job, events)
        events.tell("done")
    except Exception as error:
        events.tell("error", message=reason(error))
        traceback.print_exc()
        status = 1
    if status == 0:
        atexit._run_exitfuncs()  # among them Horovod's shutdown, which the fork server would leave out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # after an error, a clean exit would wait for ranks that are not coming


def train_cells(job: EngineJob, events: Events) -> None:
    """Joins the job's other ranks, trains, leaves."""
    engine = start_engine(job.engine, job, own_device(job.settings.device))
    worker = Worker(job, engine, events)
    events.tell("ready")
    worker.run()
    engine.stop()


def compute_references(job: EngineJob, events: Events) -> None:
    """Computes the references of every workload in a job."""
    workloads = {name: make_workload(name, job.settings) for name in job.workloads}
    events.tell("ready")
    for name, workload in workloads.items():
        reference = make_reference(
            workload, job.size, job.settings, lambda step: events.tell("step", step=step + 1)
        )
        reference.save(job.reference_file(name))
        facts = {"title": workload.title, "line": workload.model_line, "small": workload.small}
        losses = [statistics.fmean(step) for step in zip(*reference.losses)]  # while all ranks have batches
        events.tell("reference", workload=name, layers=reference.layers, losses=losses, **facts)


if __name__ == "__main__":
    run_process(sys.argv[1])
