"""How long training waits for a snapshot, and how much slower it runs meanwhile, for four ways of writing the same state.

Rounds alternate the ways, each of which begins with training steps that are not counted. The cost of a way beside its stall is
measured on the steps until its snapshot is on the disk, compared with steps of the same round while nothing is written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.worker import Found, MeasuredJob
from benchmarks.workloads import workload
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.schema import Range
from hvd_ckpt.snapshots.writer import SnapshotWriter

MEGABYTES = 150  # of weights and both moments of AdamW
WIDTH = 512
BLOCK_BYTES = 12 * 12 * WIDTH**2  # of a block's weights and two moments in float32
WRITERS = ("blocking", "background")


class _Run:
    """A GPT with AdamW, and its snapshots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        blocks = round(MEGABYTES * 1e6 / BLOCK_BYTES)
        self.workload = workload("gpt", {"batch": 2, "length": 64, "width": WIDTH, "layers": blocks})
        self.model = self.workload.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs, self.targets = self.workload.draw(0, 0)
        self.writers = {
            way: SnapshotWriter(
                folder / way, 1, Participant(0, 1, "00000000"), _no_warning, blocking=way == "blocking"
            )
            for way in WRITERS
        }
        self.number = 0

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
        state: dict[str, Any] = {
            "weights": self.model.state_dict(),
            "replicated": self.optimizer.state_dict(),
        }
        if way in self.writers:
            writer, written = self.writers[way], self.folder / way / f"step-{self.number:08d}"
            weights = [Range.of(f"weights/{name}", one) for name, one in state["weights"].items()]
            writer.begin(self.number, SavedState(state["replicated"], None, weights))

            def is_written() -> bool:
                writer.check()
                return written.exists()

            return is_written
        place = self.folder / f"{self.number}"
        if way == "dcp":
            return _distributed(state, place)
        with open(place, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True


def measure(job: MeasuredJob) -> list[Found]:
    """Measures all ways in this process, in a folder that is made for it and removed."""
    job.folder.mkdir(parents=True)
    run = _Run(job.folder)
    ways = [case.engine for case in job.cases]
    stalls: dict[str, list[float]] = {way: [] for way in ways}
    added: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for number, way in alternating(ways, 1 + job.steps):
            stall, slower = _measured(run, way)
            if number > 0:  # in the first round memory is got from the system, which keeps it
                stalls[way].append(stall)
                added[way].append(slower)
    finally:
        for writer in run.writers.values():
            writer.close()
        shutil.rmtree(job.folder, ignore_errors=True)
    size = sum(parameter.nbytes for parameter in run.model.parameters()) * 3 / 1e6
    return [
        {"seconds": stalls[way], "added": statistics.median(added[way]), "megabytes": size} for way in ways
    ]


def _measured(run: _Run, way: str) -> tuple[float, float]:
    """Seconds of the stall, and seconds added to the steps meanwhile."""
    run.step()
    plain = statistics.median(run.step()[0] for _ in range(3))
    start = time.perf_counter()
    written = run.begin(way)
    stall = time.perf_counter() - start
    added = 0.0
    while not written():
        seconds, waited = run.step()
        stall += waited
        added += seconds - plain
    for path in run.folder.iterdir():
        if path.name not in WRITERS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return stall, added


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
