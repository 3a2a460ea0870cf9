"""Pauses of a training for its snapshots."""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Found, MeasuredJob
from benchmarks.suites.snapshots import WRITERS
from benchmarks.workloads import workload
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.schema import Range
from hvd_ckpt.snapshots.writer import SnapshotWriter

SIZES = {"batch": 2, "length": 64, "width": 512, "layers": 4}  # 150 MB of weights and both moments of AdamW


class _Run:
    """A GPT with AdamW, and its snapshots."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.workload = workload("gpt", SIZES)
        self.model = self.workload.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs, self.targets = self.workload.draw(0, 0)
        self.writers = {
            way: SnapshotWriter(folder / way, 1, 0, 1, "00000000", _no_warning, blocking=way == "blocking")
            for way in WRITERS
        }

    def step(self) -> tuple[float, float]:
        """Seconds of a step without its wait for the writer, and of that wait."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        torch.autograd.backward(self.workload.loss(self.model(self.inputs), self.targets))
        before = time.perf_counter()
        for writer in self.writers.values():
            writer.before_update()
        waited = time.perf_counter() - before
        self.optimizer.step()
        return time.perf_counter() - start - waited, waited

    def begin(self, way: str) -> Callable[[], bool]:
        """Writes, or begins to write; returns a function that says whether the snapshot is on the disk."""
        self.number += 1
        weights, state = self.model.state_dict(), self.optimizer.state_dict()
        if way == "dcp":
            return _distributed({"weights": weights, "replicated": state}, self.folder / f"{self.number}")
        writer, written = self.writers[way], self.folder / way / f"step-{self.number:08d}"
        tensors = {f"weights/{name}": one for name, one in weights.items()}
        for number, kept in state["state"].items():
            tensors |= {f"optimizer.{key}/{number}": value for key, value in kept.items()}
        ranges = [Range.of(name, one) for name, one in tensors.items()]
        writer.begin(self.number, SavedState(None, None, ranges))

        def is_written() -> bool:
            writer.check()
            return written.exists()

        return is_written

    def stall(self, way: str) -> tuple[float, float]:
        """Seconds for which the training waits for a snapshot, and seconds added to the steps meanwhile."""
        self.step()
        plain = statistics.median(self.step()[0] for _ in range(3))
        start = time.perf_counter()
        written = self.begin(way)
        stall, added = time.perf_counter() - start, 0.0
        while not written():
            seconds, waited = self.step()
            stall += waited
            added += seconds - plain
        for path in self.folder.iterdir():
            if path.name not in WRITERS:
                shutil.rmtree(path)
        return stall, added


def measure(job: MeasuredJob) -> list[Found]:
    """Measures all ways in this process, in a folder that is made for it and removed."""
    job.folder.mkdir(parents=True)
    run = _Run(job.folder)
    found: dict[str, list[tuple[float, float]]] = {case.engine: [] for case in job.cases}
    try:
        for number, way in alternating([*found], 1 + job.steps):
            stall = run.stall(way)
            if number > 0:  # in the first round memory is got from the system, which keeps it
                found[way].append(stall)
    finally:
        for writer in run.writers.values():
            writer.close()
        shutil.rmtree(job.folder, ignore_errors=True)
    size = sum(parameter.nbytes for parameter in run.model.parameters()) * 3 / 1e6
    each = [list(zip(*pairs)) for pairs in found.values()]
    return [
        {"seconds": stalls, "added": statistics.median(added), "megabytes": size} for stalls, added in each
    ]


def _distributed(state: dict[str, Any], place: Path) -> Callable[[], bool]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of there being one process
        future: Any = async_save(state, storage_writer=FileSystemWriter(place, sync_files=True), no_dist=True)

    def done() -> bool:
        finished: bool = future.done()
        if finished:
            future.result()  # raises what has gone wrong
        return finished

    return done


def _no_warning(text: str) -> None:
    raise RuntimeError(text)
