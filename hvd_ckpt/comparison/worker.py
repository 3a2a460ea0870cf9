"""One rank of an engine's job: trains the cells one after the other and writes what came out.

Run by the launcher as ``python -m hvd_ckpt.comparison.worker JOB`` under ``horovodrun``, where JOB is the file that
describes the job. The first error ends the process, because the ranks are no longer in step then; the launcher
starts a fresh job for the cells that are left.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

import torch

from hvd_ckpt.comparison.cells import Cell
from hvd_ckpt.comparison.engines import Engine, find_engine, launched_rank_and_size
from hvd_ckpt.comparison.events import EventWriter
from hvd_ckpt.comparison.job import Job
from hvd_ckpt.comparison.reference import Reference, largest_difference
from hvd_ckpt.comparison.training import Trained, fingerprint, train
from hvd_ckpt.comparison.workloads import Workload, make_workload
from hvd_ckpt.memory import PeakMemory, recording_peak

__all__ = ["Worker"]


class Worker:
    """Trains the cells of a job on one rank."""

    def __init__(self, job: Job, engine: Engine, events: EventWriter) -> None:
        self._job = job
        self._engine = engine
        self._events = events
        self._workloads: dict[str, Workload] = {
            name: make_workload(name, job.scale, job.seed, job.text) for name in job.workloads
        }
        self._references = {name: Reference.load(job.reference_file(name)) for name in job.workloads}

    def run(self) -> None:
        """Train every cell, first for time and result, then (if the job says so) for memory and the result again."""
        gc.collect()
        gc.freeze()  # imports have left a million objects that no collection between cells needs to visit
        for key in self._job.cells:
            cell = Cell.from_key(key)
            self._events.write("cell", cell=key)
            trained = self._train(cell)
            self._events.write("trained", cell=key, **self._outcome(cell, trained))
            if self._job.memory:
                del trained
                gc.collect()
                trained, memory = self._train_for_memory(cell)
                hashes = self._hashes(trained)
                self._events.write("measured", cell=key, peak_bytes=memory.peak_bytes, **hashes)
            del trained
            gc.collect()
            self._events.write("finished", cell=key)

    def _train(self, cell: Cell) -> Trained:
        return train(
            self._workloads[cell.workload],
            self._engine,
            cell,
            steps=self._job.steps,
            seed=self._job.seed,
            after_step=lambda step: self._events.write("step", cell=cell.key, step=step),
        )

    def _train_for_memory(self, cell: Cell) -> tuple[Trained, PeakMemory]:
        """The peak includes weights, gradients and optimizer: all that training allocates, from before the model is."""
        with recording_peak() as memory:
            trained = self._train(cell)
        return trained, memory

    def _hashes(self, trained: Trained) -> dict[str, str]:
        return {
            "weights": fingerprint(trained.chain.named_parameters()),
            "buffers": fingerprint(trained.chain.named_buffers()),
        }

    def _outcome(self, cell: Cell, trained: Trained) -> dict[str, object]:
        """This rank's result beside the reference: hashes, differences, losses, times."""
        reference = self._references[cell.workload]
        parameters = dict(trained.chain.named_parameters())
        buffers = dict(trained.chain.named_buffers())
        names = ("difference", "relative", "worst")
        weights_apart = largest_difference(parameters, reference.parameters, reference.start)
        buffers_apart = largest_difference(buffers, reference.buffers[self._engine.rank], reference.start)
        return {
            **self._hashes(trained),
            **dict(zip(names, weights_apart, strict=True)),
            **{f"buffer_{name}": value for name, value in zip(names, buffers_apart, strict=True)},
            "losses": trained.losses,
            "seconds": trained.seconds,
        }


def main(job_file: str) -> None:
    """Join the job's other ranks, train, leave; an error is an event, a traceback in the log, and exit status 1."""
    job = Job.load(Path(job_file))
    rank, _ = launched_rank_and_size()
    with EventWriter(job.folder, rank) as events:
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
            os._exit(1)  # a clean exit would wait for ranks that are not coming


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1])
