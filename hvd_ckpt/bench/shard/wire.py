"""Wire formats: a run of training in each, with its losses, and the error and bytes of what is sent.

One job trains all of them, one after the other. Run by the launcher as ``python -m hvd_ckpt.bench.shard.wire JOB``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import hvd_ckpt as hc
from hvd_ckpt.bench.harness.jobs import RankJob, run_rank
from hvd_ckpt.bench.harness.report import Table
from hvd_ckpt.bench.shard.engines import Ours, Samples, build, loss
from hvd_ckpt.bench.shard.job import OURS, Configuration, Training
from hvd_ckpt.sharding.formats import wire_format

FORMATS = ("fp32", "fp16", "bf16", "int8")
STAGES = (2, 3)
LAST = 20  # steps whose mean loss is the final one
MIB = 1 << 20


@dataclass(frozen=True)
class WireJob(RankJob):
    """One model, trained from the same start with each format at stages 2 and 3.

    Attributes:
        training: the model and its steps.
        steps: of each run.
    """

    worker = "hvd_ckpt.bench.shard.wire"

    training: Training
    steps: int


@dataclass(frozen=True)
class Run:
    """One run, on one rank.

    Attributes:
        stage, format: what was split, and the wire format of gradients and parameters.
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
        last = self.losses[-LAST:]
        finite = [loss for loss in last if loss is not None]
        return statistics.fmean(finite) if len(finite) == len(last) else None


def wire_table(runs: Sequence[Run]) -> Table:
    """A row for each run; differences are to the run in fp32 at the same stage."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        exact = next(one for one in runs if (one.stage, one.format) == (run.stage, FORMATS[0]))
        final = "not finite" if run.final is None else f"{run.final:.4f}"
        to_fp32 = "-" if run.final is None or exact.final is None else f"{run.final - exact.final:+.4f}"
        errors = (f"{run.gradient_error:.1e}", f"{run.weight_error:.1e}")
        of_fp32 = f"{run.sent / exact.sent:.3f}" if exact.sent else "-"
        rows.append((str(run.stage), run.format, final, to_fp32, *errors, f"{run.sent / MIB:.2f}", of_fp32))
    columns = (
        "stage", "format", "final loss", "to fp32", "error of gradients", "error of weights", "MiB a step", "of fp32"
    )  # fmt: skip
    return Table(columns, rows, f"Wire formats: loss after {len(runs[0].losses)} steps", left=columns[:2])


def measure(job: WireJob) -> list[Run]:
    """One rank's part of a job."""
    hc.init()
    samples = Samples(job.training, hc.rank(), hc.size())
    runs = []
    for stage in STAGES:
        for name in FORMATS:
            gradient_error, weight_error = _errors(job, samples, name)
            session = Ours(
                build(job.training), Configuration(OURS, stage), job.training, job.folder, wire=name
            )
            losses, sent = [], 0
            for number in range(job.steps):
                before = session.sent()
                losses.append(session.step(samples.step(number)))
                sent = session.sent() - before
            every = torch.tensor(losses, dtype=torch.float64)
            means = hc.allreduce(every, name=f"losses.{stage}.{name}").tolist()
            finite = [mean if math.isfinite(mean) else None for mean in means]
            runs.append(Run(stage, name, finite, sent, gradient_error, weight_error))
    return runs


def _errors(job: WireJob, samples: Samples, name: str) -> tuple[float, float]:
    model = build(job.training)
    loss(model, samples.sample(0)).backward()  # type: ignore[no-untyped-call]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return _error(gradients, name), _error([one.detach() for one in model.parameters()], name)


def _error(tensors: Sequence[torch.Tensor], name: str) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    rounded = wire_format(name).rounded(flat.clone())
    return float((rounded - flat).norm() / flat.norm())


if __name__ == "__main__":
    run_rank(WireJob, measure)
