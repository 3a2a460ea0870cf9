"""The results of all ranks, the tables and the picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shard.job import OURS, Configuration, Findings
from hvd_ckpt.app.compare.runner.cases import (
    Column,
    attributes,
    in_mib,
    quartiles_in_ms,
    results_of,
    table_of,
    yes_or_no,
)
from hvd_ckpt.app.compare.runner.report import MIB, Table, save_figure
from hvd_ckpt.app.compare.runner.stats import Quartiles, quartiles, quartiles_of_ratios, slowest

ITEM = 4  # bytes of a parameter
PICTURE = "shard.png"
NOTES = (
    "All engines train the same GPT-lite from the same start on the same samples: Adam in float32, micro-batches of one sample. "
    "Steps take turns in the same processes (A B C, then C B A); a step's time is the slowest rank's; median and quartiles "
    "over rounds.",
    "Stages 0 and 1 reduce the sum of all micro-batches once; stages 2 and 3 reduce-scatter after each, so that no rank holds "
    "whole gradients.",
    "ratio to best baseline: time relative to the engine of the same stage and recomputation whose median is least.",
    "counted MiB: what each rank must send in a step: by this library's own count, and for others by the collectives of "
    "torch.distributed that they call, each done in the best way: an allreduce of n ranks sends 2 (n - 1) / n of its bytes, "
    "all others (n - 1) / n. in models: in units of gathering the model once. loss difference: the greatest difference of a rank's "
    "loss in a step to the first row's.",
    "Memory, mean over ranks: parameters, gradients and optimizer state are tensors held when the gradients are ready; peak: the "
    "most that PyTorch's allocator has given out in a step, on the training thread and autograd's; activations: the peak of a "
    "micro-batch of the bare model above its parameters and gradients; buffers: the rest up to the peak of a step. Blocks that "
    "Gloo's threads free for FSDP2 are estimated, which makes its buffers uncertain.",
    "bytes per parameter: of parameters, gradients and optimizer state in memory, on the rank that holds the most.",
)
WHO = (
    Column("engine", lambda result: result.configuration.title, left=True),
    Column("recomputed", lambda result: result.configuration.recompute, yes_or_no, left=True),
)
KINDS = {
    "parameters": ("parameters", "#1b6ca8"),
    "gradients": ("gradients", "#66a182"),
    "state": ("optimizer state", "#edae49"),
    "buffers": ("buckets and other buffers", "#b8b8b8"),
    "activations": ("activations", "#d1495b"),
}
OUR_COLOR, OTHER_COLOR = "#1b6ca8", "#9aa5b1"


@dataclass
class Result:
    """One configuration.

    Attributes:
        configuration: which.
        ranks: the findings of each rank, in rank order; empty if its job has failed.
        failure: why results are missing, in one line.
    """

    configuration: Configuration
    ranks: list[Findings] = field(default_factory=list)
    failure: str | None = None

    @property
    def title(self) -> str:
        return self.configuration.title + ", recomputed" * self.configuration.recompute

    @property
    def seconds(self) -> list[float]:
        """Of each round, on the slowest rank."""
        return slowest(rank.seconds for rank in self.ranks)

    @property
    def step(self) -> Quartiles | None:
        """Seconds of a step over the rounds."""
        return quartiles(self.seconds) if self.seconds else None

    def mean(self, attribute: str) -> float:
        """The mean of all ranks' findings."""
        return statistics.fmean(getattr(rank, attribute) for rank in self.ranks)

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state in memory, on the rank that holds the most."""
        return max(rank.parameters + rank.gradients + rank.state for rank in self.ranks)

    def kinds(self) -> dict[str, float]:
        """Mean bytes of a rank at the peak of a step, by kind; buffers are what is neither model state nor activations: buckets,
        parameters gathered for a while, copies."""
        held = {name: self.mean(name) for name in ("parameters", "gradients", "state")}
        passing = max(0.0, self.mean("peak") - sum(held.values()))
        # They are measured on the bare model, and may be more than this peak leaves beside the states.
        activations = min(self.mean("activations"), passing)
        return {**held, "buffers": passing - activations, "activations": activations}


@dataclass
class Results:
    """All configurations.

    Attributes:
        size: number of ranks.
        passes: micro-batches of a step.
        elements: of all parameters.
        all: in the order of the tables.
        failure: why there are no times, in one line.
    """

    size: int
    passes: int
    elements: int
    all: list[Result]
    failure: str | None = None

    def take(self, ranks: Sequence[dict[str, Findings]], chosen: Iterable[Result], *, memory: bool) -> None:
        """Add the results of a job about some configurations: everything, or without ``memory`` the times."""
        for result in chosen:
            findings = [rank[result.configuration.name] for rank in ranks]
            failures = [rank.failure for rank in findings if rank.failure is not None]
            if failures:
                result.failure = failures[0]
            elif memory:
                result.ranks = findings
            else:
                result.ranks = [
                    dataclasses.replace(before, seconds=now.seconds, losses=now.losses)
                    for before, now in zip(result.ranks, findings)
                ]

    @property
    def shown(self) -> list[Result]:
        """The configurations that have been measured."""
        return [result for result in self.all if result.ranks]

    @property
    def sound(self) -> bool:
        """Whether this library has done all that it was asked for."""
        return self.failure is None and all(
            result.failure is None for result in self.all if result.configuration.ours
        )

    def of_best_baseline(self, result: Result) -> Quartiles | None:
        """The time of a step as a ratio to the fastest peer's that does the same, over the rounds."""
        timed = [
            (peer.step.median, peer.seconds)
            for peer in self.all
            if peer.step and peer.configuration.is_baseline_of(result.configuration)
        ]
        return quartiles_of_ratios(result.seconds, min(timed)[1]) if timed else None

    def model_volumes(self, result: Result) -> float | None:
        """Counted bytes of a step as a multiple of gathering the model once."""
        once = self.elements * ITEM * (self.size - 1) / self.size
        return result.mean("counted") / once if once and result.ranks else None

    def samples_per_second(self, result: Result) -> float | None:
        """Over all ranks."""
        return None if result.step is None else self.size * self.passes / result.step.median

    def loss_difference(self, result: Result) -> float | None:
        """The greatest difference of a rank's loss in a step to that of this library's first result."""
        first = next((result for result in self.shown if result.configuration.engine == OURS), None)
        if first is None:
            return None
        pairs = [zip(rank.losses, other.losses) for rank, other in zip(result.ranks, first.ranks)]
        return max((abs(loss - other) for pair in pairs for loss, other in pair), default=None)

    def time_columns(self) -> list[Column]:
        """Time and messages."""
        return [
            *WHO,
            Column("step ms", lambda result: result.step, quartiles_in_ms(".0f")),
            Column("samples/s", self.samples_per_second, ".1f"),
            Column("ratio to best baseline", self.of_best_baseline, ".2f", key="of_best_baseline"),
            Column("counted MiB", lambda result: result.mean("counted"), in_mib()),
            Column("in models", self.model_volumes, ".2f", key="model_volumes"),
            Column("loss difference", self.loss_difference, ".1e", key="loss_difference"),
        ]

    def memory_columns(self) -> list[Column]:
        """Memory of a rank."""

        def of(kind: str) -> Column:
            return Column(KINDS[kind][0], lambda result: result.kinds()[kind], in_mib())

        return [
            *WHO,
            *(of(kind) for kind in ("parameters", "gradients", "state")),
            Column("on disk", lambda result: result.mean("on_disk") or None, in_mib()),
            Column("buffers", lambda result: result.kinds()["buffers"], in_mib()),
            of("activations"),
            Column("peak", lambda result: result.mean("peak"), in_mib()),
            Column("bytes per parameter", lambda result: result.states / self.elements, ".2f"),
        ]

    def time_table(self) -> Table:
        """The table of time and messages."""
        return table_of(self.time_columns(), self.shown, "Time and messages")

    def memory_table(self) -> Table:
        """The table of memory."""
        return table_of(self.memory_columns(), self.shown, "Memory of a rank, MiB")

    def remarks(self) -> list[str]:
        """Missing results, and the reasons."""
        missing = [f"{result.title}: left out: {result.failure}" for result in self.all if result.failure]
        return missing + ([f"No times: {self.failure}"] if self.failure is not None else [])

    def for_programs(self) -> list[dict[str, Any]]:
        """All results with the findings of every rank; its columns also see results that failed, which have no ranks."""

        def of_configuration(name: str) -> Column:
            return Column("", lambda result: getattr(result.configuration, name), key=name)

        columns = [
            Column("", lambda result: result.configuration.name, key="configuration"),
            *(of_configuration(name) for name in ("engine", "stage", "recompute", "offload")),
            *attributes("seconds", "ranks", "failure"),
            Column("", lambda result: result.kinds() if result.ranks else {}, key="kinds"),
            *self.time_columns(),
        ]
        return results_of(columns, self.all)

    def draw(self, path: Path) -> str:
        """Memory of a rank by kind, and throughput: a bar for each configuration, stage by stage."""
        from matplotlib.figure import Figure

        shown = self.shown
        figure = Figure(figsize=(13, 1.6 + 0.3 * len(shown)), layout="constrained")
        memory, speed = figure.subplots(1, 2, sharey=True)
        stages = sorted({result.configuration.stage for result in shown})
        rows = [
            number + 0.6 * stages.index(result.configuration.stage) for number, result in enumerate(shown)
        ]
        left = [0.0] * len(shown)
        for kind, (label, color) in KINDS.items():
            widths = [result.kinds()[kind] / MIB for result in shown]
            memory.barh(rows, widths, left=left, color=color, label=label, height=0.8)
            left = [begun + width for begun, width in zip(left, widths)]
        speeds = [self.samples_per_second(result) or 0.0 for result in shown]
        colors = [OUR_COLOR if result.configuration.ours else OTHER_COLOR for result in shown]
        bars = speed.barh(rows, speeds, color=colors, height=0.8)
        speed.bar_label(bars, [f"{value:.1f}" for value in speeds], fontsize=7, padding=2)
        memory.set_yticks(rows, [result.title for result in shown], fontsize=8)
        memory.invert_yaxis()
        memory.set_xlabel("peak memory of a rank, MiB")
        speed.set_xlabel(f"samples per second, {self.size} ranks")
        handles = memory.get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=len(KINDS), fontsize=8, frameon=False)
        speed.margins(x=0.1)
        for axes in (memory, speed):
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
        return save_figure(figure, path)
