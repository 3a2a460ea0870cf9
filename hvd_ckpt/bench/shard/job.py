"""A job: what the launcher tells the ranks it starts, what each of them answers, as JSON files in one folder; and the start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.harness.jobs import JobError, error_line, rank_environment, run_ranks
from hvd_ckpt.bench.rank_job import RankJob
from hvd_ckpt.bench.shard.model import Size
from hvd_ckpt.json_file import write_json
from hvd_ckpt.runtime import threads_per_rank

__all__ = ["Answer", "Findings", "Job", "run_job"]

WORKER = "hvd_ckpt.bench.shard.worker"
RETURNING = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # freed memory leaves the resident set


@dataclass(frozen=True)
class Job(RankJob):
    """Contenders on one model.

    Attributes:
        contenders: their names.
        text: what the samples are of; None for the source text of the Python standard library.
        width, layers, heads, length: the model's size.
        passes: micro-batches of a step.
        bucket_mb: largest bucket of gradients, in MiB.
        memory: look at the memory and the messages of each contender by itself.
        rounds: timed steps of each contender, in turn; 0 for none.
    """

    contenders: tuple[str, ...]
    text: str | None
    width: int
    layers: int
    heads: int
    length: int
    passes: int
    bucket_mb: float
    memory: bool
    rounds: int

    @property
    def model_size(self) -> Size:
        return Size(self.width, self.layers, self.heads, self.length)


@dataclass
class Findings:
    """What one rank has found out about one contender. Bytes; None where the system does not tell.

    Attributes:
        losses: of each step, the mean over this rank's samples.
        parameters, gradients, state, on_disk: held for training when the gradients are ready, the last in mapped files.
        held: all of the heap at that time; ``peak``: the most of a step; both above the heap before the model was built.
        resident: the most that the resident set has been, above what it was then.
        activations: peak of a micro-batch of the bare model above what it holds for training.
        counted: sent in a step by the contender's own count, or by what it asks ``torch.distributed`` for.
        sent: delivered by its connections in a step.
        seconds: of each timed step.
        failure: why there is no more, in one line.
    """

    losses: list[float] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    on_disk: int = 0
    held: int | None = None
    peak: int | None = None
    resident: int | None = None
    activations: int = 0
    counted: int | None = None
    sent: int | None = None
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass
class Answer:
    """What one rank has found out.

    Attributes:
        threads: CPU threads that PyTorch used.
        elements: of all parameters of the model.
        findings: by the contender's name.
    """

    threads: int
    elements: int
    findings: dict[str, Findings]

    def save(self, file: Path) -> None:
        write_json(dataclasses.asdict(self), file)

    @classmethod
    def load(cls, file: Path) -> Answer:
        values = json.loads(file.read_text(encoding="utf-8"))
        findings = {name: Findings(**value) for name, value in values.pop("findings").items()}
        return cls(**values, findings=findings)


def run_job(job: Job, controller: str, timeout: float) -> list[Answer]:
    """Launch ``job`` over ``controller``; the answer of each rank, in rank order.

    Raises:
        JobError: a rank failed, or the job took longer than ``timeout`` seconds.
    """
    start(WORKER, job, controller, timeout, RETURNING if job.memory and not job.rounds else {})
    return [Answer.load(job.answer_file(rank)) for rank in range(job.size)]


def start(module: str, job: RankJob, controller: str, timeout: float, variables: Mapping[str, str]) -> None:
    """Runs ``module`` on the ranks of a job until each has answered.

    Raises:
        JobError: as :func:`run_job`.
    """
    job.save()
    environment = {**rank_environment(threads_per_rank(job.size)), **variables}
    log_file = job.folder / "log.txt"
    status = run_ranks(module, job.file, job.size, controller, environment, log_file, timeout)
    if status is None:
        raise JobError(f"no end after {timeout:.0f} s (log: {log_file})")
    if status != 0 or not all(job.answer_file(rank).exists() for rank in range(job.size)):
        raise JobError(f"{error_line(log_file)} (status {status}, log: {log_file})")
