"""The results of all ranks, the tables and the picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ckpt.bench.harness.report import MIB, Table, mebibytes, save_figure, shown
from hvd_ckpt.bench.harness.stats import Quartiles, quartiles, quartiles_of_ratios, slowest
from hvd_ckpt.bench.shard.job import OURS, Configuration, Findings

ITEM = 4  # bytes of a parameter
PICTURE = "shard.png"
TIME_COLUMNS = (
    "engine", "recomputed", "step ms", "samples/s", "ratio to best baseline", "counted MiB", "in models", "loss difference"
)  # fmt: skip
MEMORY_COLUMNS = (
    "engine", "recomputed", "parameters", "gradients", "optimizer state", "on disk", "buffers", "activations", "peak",
    "bytes per parameter",
)  # fmt: skip
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
        return slowest(found.seconds for found in self.ranks)

    @property
    def step(self) -> Quartiles | None:
        """Seconds of a step over the rounds."""
        return quartiles(self.seconds) if self.seconds else None

    def mean(self, attribute: str) -> float:
        """The mean of all ranks' findings."""
        return statistics.fmean(getattr(found, attribute) for found in self.ranks)

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state in memory, on the rank that holds the most."""
        return max(found.parameters + found.gradients + found.state for found in self.ranks)

    def kinds(self) -> dict[str, float]:
        """Mean bytes of a rank at the peak of a step, by kind; buffers are what is neither model state nor activations: buckets,
        parameters gathered for a while, copies."""
        held = {name: self.mean(name) for name in ("parameters", "gradients", "state")}
        passing = max(0.0, self.mean("peak") - sum(held.values()))
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
            found = [rank[result.configuration.name] for rank in ranks]
            failures = [one.failure for one in found if one.failure is not None]
            if failures:
                result.failure = failures[0]
            elif memory:
                result.ranks = found
            else:
                result.ranks = [
                    dataclasses.replace(before, seconds=now.seconds, losses=now.losses)
                    for before, now in zip(result.ranks, found)
                ]

    @property
    def shown(self) -> list[Result]:
        """The configurations that have been measured."""
        return [one for one in self.all if one.ranks]

    @property
    def sound(self) -> bool:
        """Whether this library has done all that it was asked for."""
        return self.failure is None and all(one.failure is None for one in self.all if one.configuration.ours)

    def of_best_baseline(self, result: Result) -> Quartiles | None:
        """The time of a step as a ratio to the fastest peer's that does the same, over the rounds."""
        timed = [
            (one.step.median, one.seconds)
            for one in self.all
            if one.step and one.configuration.is_baseline_of(result.configuration)
        ]
        return quartiles_of_ratios(result.seconds, min(timed)[1]) if timed else None

    def model_volumes(self, result: Result) -> float | None:
        """Counted bytes of a step as a multiple of gathering the model once."""
        once = self.elements * ITEM * (self.size - 1) / self.size
        return result.mean("counted") / once if once else None

    def samples_per_second(self, result: Result) -> float | None:
        """Over all ranks."""
        return None if result.step is None else self.size * self.passes / result.step.median

    def loss_difference(self, result: Result) -> float | None:
        """The greatest difference of a rank's loss in a step to that of this library's first result."""
        first = next((one for one in self.shown if one.configuration.engine == OURS), None)
        if first is None:
            return None
        pairs = [zip(one.losses, other.losses) for one, other in zip(result.ranks, first.ranks)]
        return max((abs(one - other) for pair in pairs for one, other in pair), default=None)

    def time_table(self) -> Table:
        """Time and messages."""

        def row(one: Result) -> tuple[str, ...]:
            return (
                *_who(one),
                shown(quartiles([1000 * seconds for seconds in one.seconds]) if one.seconds else None, ".0f"),
                shown(self.samples_per_second(one), ".1f"),
                shown(self.of_best_baseline(one), ".2f"),
                mebibytes(one.mean("counted")),
                shown(self.model_volumes(one), ".2f"),
                shown(self.loss_difference(one), ".1e"),
            )

        return Table(
            TIME_COLUMNS, [row(one) for one in self.shown], "Time and messages", left=TIME_COLUMNS[:2]
        )

    def memory_table(self) -> Table:
        """Memory of a rank."""
        rows = []
        for one in self.shown:
            kinds, on_disk = one.kinds(), one.mean("on_disk")
            rows.append((
                *_who(one),
                *(mebibytes(kinds[kind]) for kind in ("parameters", "gradients", "state")),
                mebibytes(on_disk or None),
                *(mebibytes(value) for value in (kinds["buffers"], kinds["activations"], one.mean("peak"))),
                f"{one.states / self.elements:.2f}",
            ))  # fmt: skip
        return Table(MEMORY_COLUMNS, rows, "Memory of a rank, MiB", left=MEMORY_COLUMNS[:2])

    def remarks(self) -> list[str]:
        """Missing results, and the reasons."""
        missing = [f"{one.title}: left out: {one.failure}" for one in self.all if one.failure]
        return missing + ([f"No times: {self.failure}"] if self.failure is not None else [])

    def for_programs(self) -> list[dict[str, Any]]:
        """All results with the findings of every rank."""
        return [
            {
                "configuration": one.configuration.name,
                **vars(one.configuration),
                "seconds": one.seconds,
                "of_best_baseline": self.of_best_baseline(one),
                "model_volumes": self.model_volumes(one) if one.ranks else None,
                "loss_difference": self.loss_difference(one),
                "kinds": one.kinds() if one.ranks else {},
                "ranks": one.ranks,
                "failure": one.failure,
            }
            for one in self.all
        ]

    def draw(self, path: Path) -> str:
        """Memory of a rank by kind, and throughput: a bar for each configuration, stage by stage."""
        from matplotlib.figure import Figure

        shown = self.shown
        figure = Figure(figsize=(13, 1.6 + 0.3 * len(shown)), layout="constrained")
        memory, speed = figure.subplots(1, 2, sharey=True)
        stages = sorted({one.configuration.stage for one in shown})
        rows = [number + 0.6 * stages.index(one.configuration.stage) for number, one in enumerate(shown)]
        left = [0.0] * len(shown)
        for kind, (label, color) in KINDS.items():
            widths = [one.kinds()[kind] / MIB for one in shown]
            memory.barh(rows, widths, left=left, color=color, label=label, height=0.8)
            left = [begun + width for begun, width in zip(left, widths)]
        speeds = [self.samples_per_second(one) or 0.0 for one in shown]
        colors = [OUR_COLOR if one.configuration.ours else OTHER_COLOR for one in shown]
        bars = speed.barh(rows, speeds, color=colors, height=0.8)
        speed.bar_label(bars, [f"{value:.1f}" for value in speeds], fontsize=7, padding=2)
        memory.set_yticks(rows, [one.title for one in shown], fontsize=8)
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


def _who(one: Result) -> tuple[str, str]:
    return one.configuration.title, "yes" if one.configuration.recompute else "no"
