"""A job: what the launcher tells the ranks it starts, what each of them answers, as JSON files in one folder; and the start."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.launch import run_ranks
from hvd_ckpt.bench.rank_job import RankJob
from hvd_ckpt.json_file import write_json
from hvd_ckpt.probe import launcher_environment

__all__ = ["Answer", "Job", "run_job"]

WORKER = "hvd_ckpt.bench.train.worker"


@dataclass(frozen=True)
class Job(RankJob):
    """One model with one number of micro-batches.

    Attributes:
        model: a name of the catalogue.
        accumulate: micro-batches of a step.
        batch: samples of a step on each rank.
        rounds: timed rounds of each loop.
        steps: of a round.
    """

    model: str
    accumulate: int
    batch: int
    rounds: int
    steps: int


@dataclass
class Answer:
    """What one rank measured.

    Attributes:
        threads: CPU threads that PyTorch used.
        trainer, by_hand: seconds of each round of the two loops.
        differences: weights and buffers that differ between the models of both after the same steps.
        failure: why there is nothing, in one line.
    """

    threads: int
    trainer: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None

    def save(self, file: Path) -> None:
        write_json(dataclasses.asdict(self), file)

    @classmethod
    def load(cls, file: Path) -> Answer:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def run_job(job: Job, controller: str, timeout: float) -> list[Answer]:
    """Launch ``job`` over ``controller``; the answer of each rank, in rank order, or a single one that says what went wrong."""
    job.save()
    log_file = job.folder / "log.txt"
    status = run_ranks(WORKER, job.file, job.size, controller, launcher_environment(), log_file, timeout)
    files = [job.answer_file(rank) for rank in range(job.size)]
    answers = [Answer.load(file) for file in files if file.exists()]
    failed = [answer for answer in answers if answer.failure is not None]
    if failed or (status == 0 and len(answers) == job.size):
        return failed[:1] or answers
    what = f"no end after {timeout:.0f} s" if status is None else f"a rank ended, status {status}"
    return [Answer(0, failure=f"{what} (log: {log_file})")]
