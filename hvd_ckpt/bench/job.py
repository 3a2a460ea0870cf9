"""A job: what the launcher tells the ranks it starts, and what each of them answers, as JSON files in one folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.bench.rank_job import RankJob

__all__ = ["Answer", "Job"]


@dataclass(frozen=True)
class Job(RankJob):
    """One engine's ranks, started together, timing one workload after the other.

    Attributes:
        engine: a name in the registry of engines, or ``module:Class``.
        workloads: in this order.
        steps: timed steps; None for each workload's own number.
        memory: also count the bytes held for gradients.
    """

    engine: str
    workloads: tuple[str, ...]
    steps: int | None
    memory: bool


@dataclass(frozen=True)
class Answer:
    """What one rank measured.

    Attributes:
        threads: CPU threads that PyTorch used.
        seconds: for each workload, the time of every timed step.
        gradient_bytes: for each workload, the bytes held for gradients after a step; empty if not asked for.
    """

    threads: int
    seconds: dict[str, list[float]]
    gradient_bytes: dict[str, int]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Answer:
        return cls(**json.loads(file.read_text(encoding="utf-8")))
