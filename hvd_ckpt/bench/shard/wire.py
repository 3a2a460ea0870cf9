"""Formats on the wire: a run of training in each, with the losses that it comes to, and the error and bytes of what travels.

One job trains all of them, one after the other. Run by the launcher as ``python -m hvd_ckpt.bench.shard.wire JOB``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_ckpt.bench.rank_job import RankJob
from hvd_ckpt.bench.shard.contenders import OURS, Contender
from hvd_ckpt.bench.shard.job import start
from hvd_ckpt.bench.shard.model import Samples, Size, build, loss
from hvd_ckpt.bench.shard.report import Table
from hvd_ckpt.bench.shard.results import MIB
from hvd_ckpt.bench.shard.sessions import Ours
from hvd_ckpt.json_file import write_json
from hvd_ckpt.runtime import init
from hvd_ckpt.sharding.formats import wire_format

__all__ = ["FORMATS", "STAGES", "Course", "WireJob", "run_wire_job", "wire_table"]

MODULE = "hvd_ckpt.bench.shard.wire"
FORMATS = ("fp32", "fp16", "bf16", "int8")
STAGES = (2, 3)
LAST = 20  # steps whose losses are told


@dataclass(frozen=True)
class WireJob(RankJob):
    """One model, trained from the same start with each format at stages 2 and 3.

    Attributes:
        text: what the samples are of; None for the source text of the Python standard library.
        width, layers, heads, length: the model's size.
        passes: samples of a step on each rank, each a backward pass.
        bucket_mb: largest bucket of gradients, in MiB.
        steps: of each run.
    """

    text: str | None
    width: int
    layers: int
    heads: int
    length: int
    passes: int
    bucket_mb: float
    steps: int

    @property
    def model_size(self) -> Size:
        return Size(self.width, self.layers, self.heads, self.length)


@dataclass(frozen=True)
class Course:
    """One run, on one rank.

    Attributes:
        stage, format: what was split, and how gradients and parameters travelled.
        losses: of each step, the mean over all ranks; None where it was not finite.
        sent: bytes that a rank sent in the last step, by the library's own count.
        gradient_error, weight_error: what the format changes of the first gradient and of the weights at the start: the root of
            the mean square, as a part of that of all values.
    """

    stage: int
    format: str
    losses: list[float | None]
    sent: int
    gradient_error: float
    weight_error: float

    @property
    def final(self) -> float | None:
        """The mean loss of the last steps."""
        last = [loss for loss in self.losses[-LAST:] if loss is not None]
        return statistics.fmean(last) if len(last) == len(self.losses[-LAST:]) else None


def run_wire_job(job: WireJob, controller: str, timeout: float) -> list[Course]:
    """Launch ``job`` over ``controller``; what it has come to.

    Raises:
        JobError: a rank failed, or the job took longer than ``timeout`` seconds.
    """
    start(MODULE, job, controller, timeout, {})
    return [Course(**course) for course in json.loads(job.answer_file(0).read_text(encoding="utf-8"))]


def wire_table(courses: Sequence[Course]) -> Table:
    """A row for each run; differences are to the run in fp32 at the same stage."""
    exact = {course.stage: course.final for course in courses if course.format == FORMATS[0]}
    return Table(
        f"Formats on the wire: loss after {len(courses[0].losses)} steps",
        (
            "stage",
            "format",
            "final loss",
            "to fp32",
            "error of gradients",
            "error of weights",
            "MiB a step",
            "of fp32",
        ),
        [_row(course, exact.get(course.stage), _sent_in_fp32(course, courses)) for course in courses],
    )


def _row(course: Course, exact: float | None, sent: int | None) -> tuple[str, ...]:
    return (
        str(course.stage),
        course.format,
        "not finite" if course.final is None else f"{course.final:.4f}",
        "-" if course.final is None or exact is None else f"{course.final - exact:+.4f}",
        f"{course.gradient_error:.1e}",
        f"{course.weight_error:.1e}",
        f"{course.sent / MIB:.2f}",
        "-" if not sent else f"{course.sent / sent:.3f}",
    )


def _sent_in_fp32(course: Course, courses: Sequence[Course]) -> int | None:
    return next((one.sent for one in courses if (one.stage, one.format) == (course.stage, FORMATS[0])), None)


# ---------------------------------------------------------------------------------------------------------------- on a rank


def measure(job: WireJob) -> list[Course]:
    """All runs of a job, on one rank; Horovod runs, with the job's number of ranks."""
    samples = Samples(job.text, job.length, job.passes, hvd.rank(), hvd.size())
    courses = []
    for stage in STAGES:
        for name in FORMATS:
            gradient_error, weight_error = _errors(job, samples, name)
            model = build(job.model_size)
            session = Ours(model, Contender(OURS, stage), job.passes, job.bucket_mb, job.folder, wire=name)
            losses, sent = [], 0
            for number in range(job.steps):
                before = session.sent()
                losses.append(session.step(samples.step(number)))
                sent = session.sent() - before
            means = hvd.allreduce(
                torch.tensor(losses, dtype=torch.float64), name=f"losses.{stage}.{name}"
            ).tolist()
            told = [mean if math.isfinite(mean) else None for mean in means]
            courses.append(Course(stage, name, told, sent, gradient_error, weight_error))
    return courses


def _errors(job: WireJob, samples: Samples, name: str) -> tuple[float, float]:
    model = build(job.model_size)
    loss(model, samples.sample(0)).backward()  # type: ignore[no-untyped-call]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return _error(gradients, name), _error([one.detach() for one in model.parameters()], name)


def _error(tensors: Sequence[torch.Tensor], name: str) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    rounded = wire_format(name).rounded(flat.clone())
    return float((rounded - flat).norm() / flat.norm())


def main(job_file: str) -> None:
    """Join the job's other ranks, train, leave."""
    job = WireJob.load(Path(job_file))
    init()
    try:
        write_json([dataclasses.asdict(course) for course in measure(job)], job.answer_file(hvd.rank()))
        hvd.shutdown()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a clean exit would wait for ranks that are not coming


if __name__ == "__main__":
    main(sys.argv[1])
