"""A job: what the launcher tells the ranks it starts, and what each of them answers, as JSON files in one folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.rank_job import RankJob
from hvd_ckpt.json_file import write_json

__all__ = ["Answer", "Entry", "Job"]


@dataclass(frozen=True)
class Job(RankJob):
    """One batch size on one number of ranks, all contenders in turn.

    Attributes:
        batch: images of a step, over all ranks; a multiple of ``size``.
        depth: of the DenseNet.
        pixels: height and width of an image.
        budgets: of this library's plans.
        planned: images with which plans for shares, such as ``0.57x``, are made, at most; those for bytes need the whole batch.
        rounds: timed steps of each contender.
    """

    batch: int
    depth: int
    pixels: int
    budgets: tuple[str, ...]
    planned: int
    rounds: int

    @property
    def images(self) -> int:
        """Images of a step on each rank."""
        return self.batch // self.size


@dataclass
class Entry:
    """What one contender gave on one rank, or on all of them.

    Attributes:
        name: unique within a job.
        family: ``naive``, ``official`` or ``ours``.
        peak_bytes: exact peak of one step above its start; the most that a rank needed.
        seconds: of its step in each round, by the clock of rank 0.
        differences: what differs from the contender that keeps everything after the same steps.
        failure: why it did not run, in one line: a budget that cannot be met.
    """

    name: str
    family: str
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None


@dataclass
class Answer:
    """What one rank measured.

    Attributes:
        threads: CPU threads that PyTorch used.
        entries: contenders, in the order of the table; the first keeps everything.
        note: why there are none.
        failed: whether that is an error, rather than a batch that does not fit.
    """

    threads: int
    entries: list[Entry] = field(default_factory=list)
    note: str | None = None
    failed: bool = False

    def save(self, file: Path) -> None:
        write_json(dataclasses.asdict(self), file)

    @classmethod
    def load(cls, file: Path) -> Answer:
        values = json.loads(file.read_text(encoding="utf-8"))
        entries = [Entry(**entry) for entry in values.pop("entries")]
        return cls(entries=entries, **values)
