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
from hvd_ckpt.bench.harness.jobs import RankJob, own_device, run_rank
from hvd_ckpt.bench.harness.report import Table, mebibytes
from hvd_ckpt.bench.shard.engines import Ours, Samples, build, loss
from hvd_ckpt.bench.shard.job import OURS, Configuration, Training
from hvd_ckpt.sharding.formats import WireFormat, wire_formats

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
STAGES = (2, 3)
LAST = 20  # steps whose mean loss is the final one


@dataclass(frozen=True)
class WireJob(RankJob):
    """One model, trained from the same start with each format at stages 2 and 3.

    Attributes:
        training: the model and its steps.
        steps: of each run.
        seeds: so many runs of each format, each from other weights and on other samples.
    """

    worker = "hvd_ckpt.bench.shard.wire"

    training: Training
    steps: int
    seeds: int


@dataclass(frozen=True)
class Run:
    """The runs of a format, on one rank.

    Attributes:
        stage, format: what was split, and the ``wire`` of gradients and parameters.
        losses: of each seed the mean over all ranks and the last steps; None where one was not finite.
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

    def against(self, exact: Run) -> list[float]:
        """Differences of the losses to those of another run, seed by seed."""
        pairs = zip(self.losses, exact.losses)
        return [one - other for one, other in pairs if one is not None and other is not None]


def wire_table(runs: Sequence[Run]) -> Table:
    """A row for each run; differences are to the run in fp32 at the same stage."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        exact = next(one for one in runs if (one.stage, one.format) == (run.stage, FORMATS[0]))
        finite = [loss for loss in run.losses if loss is not None]
        final = _spread(finite, "") if len(finite) == len(run.losses) else "not finite"
        to_fp32 = _spread(run.against(exact), "+")
        errors = (f"{run.gradient_error:.1e}", f"{run.weight_error:.1e}")
        of_fp32 = f"{run.sent / exact.sent:.3f}" if exact.sent else "-"
        rows.append(
            (str(run.stage), run.format, final, to_fp32, *errors, mebibytes(run.sent, ".2f"), of_fp32)
        )
    columns = (
        "stage", "format", "final loss", "to fp32", "error of gradients", "error of weights", "MiB a step", "of fp32"
    )  # fmt: skip
    title = f"Wire formats: mean and standard deviation over {len(runs[0].losses)} seeds"
    return Table(columns, rows, title, left=columns[:2])


def _spread(values: Sequence[float], sign: str) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{spread}"


def measure(job: WireJob) -> list[Run]:
    """One rank's part of a job."""
    hc.init()
    own_device(job.training.device)
    runs = []
    for stage in STAGES:
        for name in FORMATS:
            losses, sent = [], 0
            for seed in range(job.seeds):
                samples = Samples(job.training, hc.rank(), hc.size(), seed)
                session = Ours(
                    build(job.training, seed), Configuration(OURS, stage), job.training, job.folder, wire=name
                )
                for number in range(job.steps):
                    before = session.sent()
                    losses.append(session.step(samples.step(number)))
                    sent = session.sent() - before
            every = torch.tensor(losses, dtype=torch.float64)
            means = (
                hc.allreduce(every, name=f"losses.{stage}.{name}")
                .view(job.seeds, -1)[:, -LAST:]
                .mean(1)
                .tolist()
            )
            finite = [mean if math.isfinite(mean) else None for mean in means]
            runs.append(Run(stage, name, finite, sent, *_errors(job, name)))
    return runs


def _errors(job: WireJob, name: str) -> tuple[float, float]:
    model = build(job.training)
    loss(model, Samples(job.training, hc.rank(), hc.size()).micro_batch(0)).backward()  # type: ignore[no-untyped-call]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    formats = wire_formats(name)
    return _error(gradients, formats[0]), _error([one.detach() for one in model.parameters()], formats[1])


def _error(tensors: Sequence[torch.Tensor], format: WireFormat) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return float((format.rounded(flat.clone()) - flat).norm() / flat.norm())


if __name__ == "__main__":
    run_rank(WireJob, measure)
