"""How long training stands still for a snapshot, and how much slower it is meanwhile, for four ways of writing the same state.

Rounds alternate the ways, each of which begins with a step of training that is not counted. What a way costs beside its stall is
measured on the steps until its snapshot is on the disk, against steps of the same round with nothing under way.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_ckpt.models.gpt import gpt
from hvd_ckpt.snapshots import snapshot
from hvd_ckpt.snapshots.background import SnapshotWriter

__all__ = ["StallRow", "measure_stall"]

WIDTH, LENGTH, VOCABULARY = 512, 64, 256
BLOCK_BYTES = 12 * 12 * WIDTH**2  # of a block's weights and two moments in float32
WAYS = ("snapshot.write", "torch.save + fsync", "SnapshotWriter", "DCP async_save")


@dataclass(frozen=True)
class StallRow:
    """What one way of writing costs.

    Attributes:
        way: its name.
        seconds: median time that training stood still.
        ratio: median over the rounds of that time to the time of ``snapshot.write`` in the same round.
        added: median seconds by which the steps until the snapshot was on the disk were longer than others, all together.
        megabytes: of state.
    """

    way: str
    seconds: float
    ratio: float
    added: float
    megabytes: float


class _Run:
    """A GPT with AdamW, and what of its snapshots is under way."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.folder = folder
        blocks = max(round(megabytes * 1e6 / BLOCK_BYTES), 1)
        self.model = gpt(vocabulary=VOCABULARY, length=LENGTH, width=WIDTH, heads=8, layers=blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
        self.writer = SnapshotWriter(folder / "beside", 1, "00000000", 0, 1, _no_warning)
        self.number = 0

    def step(self) -> tuple[float, float]:
        """Seconds of a step without what it waited for the writer, and that."""
        start, stalled = time.perf_counter(), self.writer.stalled
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        torch.autograd.backward(loss)
        self.writer.before_update()
        self.optimizer.step()
        waited = self.writer.stalled - stalled
        return time.perf_counter() - start - waited, waited

    def state(self) -> dict[str, Any]:
        return {"weights": self.model.state_dict(), "common": self.optimizer.state_dict()}

    def begin(self, way: str) -> Callable[[], bool]:
        """Writes or begins to write; returns what says whether it is on the disk."""
        self.number += 1
        place = self.folder / f"{self.number}"
        if way == "snapshot.write":
            snapshot.write(place, self.number, **self.state(), own=None)
        elif way == "torch.save + fsync":
            with open(place, "xb") as file:
                torch.save(self.state(), file)
                file.flush()
                os.fsync(file.fileno())
        elif way == "SnapshotWriter":
            self.writer.begin(self.number, **self.state(), own=None)
            return self._is_written
        else:
            return _distributed(self.state(), place)
        return lambda: True

    def _is_written(self) -> bool:
        self.writer.check()
        return self.writer.written == self.folder / "beside" / f"step-{self.number:08d}"


def measure_stall(rounds: int, megabytes: int, folder: Path) -> list[StallRow]:
    """Measures all ways in this process.

    Args:
        rounds: medians are over so many.
        megabytes: about so much state (weights and both moments of AdamW).
        folder: on the disk to write to; what is written is removed.
    """
    place = folder / "stall"
    place.mkdir(parents=True)
    try:
        run = _Run(megabytes, place)
        with run.writer:
            for way in WAYS:  # memory is got from the system, and kept
                _measured(run, way)
            found = [_round(run, number) for number in range(rounds)]
        size = sum(parameter.nbytes for parameter in run.model.parameters()) * 3 / 1e6
        return [_row(way, found, size) for way in WAYS]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _round(run: _Run, number: int) -> dict[str, tuple[float, float]]:
    ways = WAYS if number % 2 == 0 else WAYS[::-1]
    return {way: _measured(run, way) for way in ways}


def _measured(run: _Run, way: str) -> tuple[float, float]:
    """Seconds of the stall, and seconds added to the steps beside it."""
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
        if path.name != "beside":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return stall, added


def _row(way: str, found: list[dict[str, tuple[float, float]]], size: float) -> StallRow:
    median = statistics.median
    return StallRow(
        way,
        median(one[way][0] for one in found),
        median(one[way][0] / one[WAYS[0]][0] for one in found),
        median(one[way][1] for one in found),
        size,
    )


def _distributed(state: dict[str, Any], place: Path) -> Callable[[], bool]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of there being one process
        future: Any = async_save(state, storage_writer=FileSystemWriter(place, sync_files=True), no_dist=True)

    def done() -> bool:
        if not future.done():
            return False
        future.result()
        return True

    return done


def _no_warning(text: str) -> None:
    raise RuntimeError(text)
