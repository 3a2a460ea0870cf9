"""The worker of a comparison, which trains cells on a rank of an engine's job.

It tells what it does, so that slow can be told from stuck; beside the events of every rank (:mod:`.runner.jobs`)

    ready                       training begins
    step (cell, step)           this many steps are done; 0 where a training begins
    result (cell, trainings)    the figures of each training of a cell

Events of cells also tell whether a step takes milliseconds: ``small``.

The first error ends the process, because the ranks are no longer in step then (see :mod:`.launch`).
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.reference import Reference, apart
from hvd_ckpt.app.compare.runner.engine import Engine
from hvd_ckpt.app.compare.runner.engines import find_engine
from hvd_ckpt.app.compare.runner.jobs import RankJob, own_device
from hvd_ckpt.app.compare.training import Training, fingerprint, train
from hvd_ckpt.app.compare.workloads import Workload, make_workload
from hvd_ckpt.processes.devices import use_deterministic_kernels
from hvd_ckpt.utils.memory import recording_peak

Figures = dict[str, Any]


@dataclass(frozen=True)
class EngineJob(RankJob):
    """The ranks of an engine, which train cells.

    Attributes:
        references: folder of the references (:meth:`.reference.Reference.save`).
        engine: a name in the registry of engines, or ``module:Class``.
        checks: each cell is trained twice, with its reductions recorded, and the second time its memory; otherwise
            once, with nothing that takes time.
    """

    worker = "hvd_ckpt.app.compare.worker:train_cells"

    references: Path
    cells: tuple[Cell, ...]
    settings: TrainingSettings
    engine: str
    checks: bool


def _figures(trained: Training, **more: Any) -> Figures:
    """Hashes of a training's result, and its reductions where any were recorded (of an engine of the user's own, none are)."""
    figures = {
        "weights": fingerprint(trained.bare.named_parameters()),
        "buffers": fingerprint(trained.bare.named_buffers()),
        **more,
    }
    recording = trained.recording
    if recording is not None and recording.order:
        figures |= {"most": recording.most, "order": recording.digest()}
    return figures


def train_cells(job: EngineJob) -> None:
    """Joins the job's other ranks, trains, leaves."""
    gc.freeze()  # objects that the imports left behind need no collection in a rank
    if job.checks:
        # Horovod reads this when it starts; without it no timeline can be started later.
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    use_deterministic_kernels()
    engine = find_engine(job.engine)()
    engine.device = own_device(job.settings.device)
    engine.start(job.folder)
    if engine.size != job.size:
        raise RuntimeError(f"the job has {engine.size} ranks instead of {job.size}")
    workloads = {
        name: make_workload(name, job.settings) for name in dict.fromkeys(cell.workload for cell in job.cells)
    }
    job.tell("ready")
    for cell in job.cells:
        workload = workloads[cell.workload]
        tell = functools.partial(job.tell, cell=cell.key, small=workload.small)
        tell("result", trainings=trainings_of(cell, workload, engine, job, tell))
        gc.collect()
    engine.stop()


def trainings_of(
    cell: Cell, workload: Workload, engine: Engine, job: EngineJob, tell: Callable[..., None]
) -> list[Figures]:
    """The figures of a cell: trained twice with a close look, or once against the clock."""

    def run() -> Training:
        tell("step", step=0)
        return train(
            workload,
            engine,
            cell,
            job.settings,
            record_in=job.folder if job.checks else None,
            after_step=lambda step: tell("step", step=step + 1),
        )

    trained = run()
    if not job.checks:
        return [_figures(trained, seconds=trained.seconds)]
    reference = Reference.load(job.references, cell.workload)
    first = _figures(trained, **apart(reference, trained, engine.rank))
    # The second run must not find the first one's memory in use.
    del trained, reference
    gc.collect()
    # The peak includes weights, gradients and optimizer: all that training allocates, from before the model is made.
    with recording_peak(job.settings.device) as memory:
        trained = run()
    return [first, _figures(trained, peak_bytes=memory.peak_bytes)]
