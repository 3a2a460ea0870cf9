"""Wire formats: a run of training in each, with its losses, and the error and bytes of what is sent.

One job trains all of them, one after the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import hvd_ckpt as hc
from benchmarks.shard.engines import Samples, Session, build, loss
from benchmarks.shard.job import OURS, Configuration, Settings
from hvd_ckpt.app.compare.runner.cases import Column, in_mib, table_of
from hvd_ckpt.app.compare.runner.engine import gradients_of
from hvd_ckpt.app.compare.runner.jobs import RankJob, own_device
from hvd_ckpt.app.compare.runner.report import Table
from hvd_ckpt.sharding.formats import WireFormat, wire_formats

FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
STAGES = (2, 3)
LAST = 20  # steps whose mean loss is the final one


@dataclass(frozen=True)
class WireJob(RankJob):
    """One model, trained from the same start with each format at stages 2 and 3; each seed has other weights and samples."""

    worker = "benchmarks.shard.wire:measure"

    settings: Settings


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
        return [loss - other for loss, other in pairs if loss is not None and other is not None]


def wire_table(runs: Sequence[Run]) -> Table:
    """A row for each run; differences are to the run in fp32 at the same stage."""
    exact = {run.stage: run for run in runs if run.format == FORMATS[0]}

    def final(run: Run) -> str:
        finite = [loss for loss in run.losses if loss is not None]
        return _spread(finite, "") if len(finite) == len(run.losses) else "not finite"

    def of_fp32(run: Run) -> float | None:
        return run.sent / exact[run.stage].sent if exact[run.stage].sent else None

    columns = (
        Column("stage", lambda run: run.stage, left=True),
        Column("format", lambda run: run.format, left=True),
        Column("final loss", final),
        Column("to fp32", lambda run: _spread(run.against(exact[run.stage]), "+")),
        Column("error of gradients", lambda run: run.gradient_error, ".1e"),
        Column("error of weights", lambda run: run.weight_error, ".1e"),
        Column("MiB a step", lambda run: run.sent, in_mib(".2f")),
        Column("of fp32", of_fp32, ".3f"),
    )
    title = f"Wire formats: mean and standard deviation over {len(runs[0].losses)} seeds"
    return table_of(columns, runs, title)


def _spread(values: Sequence[float], sign: str) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{spread}"


def measure(job: WireJob) -> list[Run]:
    """The runs of one rank."""
    hc.init()
    own_device(job.settings.device)
    runs = []
    for stage in STAGES:
        for name in FORMATS:
            losses, sent = [], 0
            for seed in range(job.settings.seeds):
                samples = Samples(job.settings, hc.rank(), hc.size(), seed)
                session = Session(Configuration(OURS, stage), job.settings, job.folder, seed, wire=name)
                for number in range(job.settings.steps):
                    before = session.sent() or 0
                    losses.append(session.step(samples.step(number)))
                    sent = (session.sent() or 0) - before
            every = torch.tensor(losses, dtype=torch.float64)
            everyone = hc.allreduce(every, name=f"losses.{stage}.{name}").view(job.settings.seeds, -1)
            means = everyone[:, -LAST:].mean(1).tolist()
            finite = [mean if math.isfinite(mean) else None for mean in means]
            runs.append(Run(stage, name, finite, sent, *_errors(job, name)))
    return runs


def _errors(job: WireJob, name: str) -> tuple[float, float]:
    model = build(job.settings)
    loss(model, Samples(job.settings, hc.rank(), hc.size()).micro_batch(0)).backward()  # type: ignore[no-untyped-call]
    gradients = gradients_of(model.parameters())
    formats = wire_formats(name)
    return _error(gradients, formats[0]), _error(
        [weight.detach() for weight in model.parameters()], formats[1]
    )


def _error(tensors: Sequence[torch.Tensor], format: WireFormat) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return float((format.rounded(flat.clone()) - flat).norm() / flat.norm())
