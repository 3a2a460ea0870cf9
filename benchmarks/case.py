"""Cases, the jobs that measure them, and the rows that these make."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.quartiles import Quartiles, quartiles, quartiles_of_ratios
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.compare.runner.report import Column, Form
from hvd_ckpt.app.compare.runner.stats import slowest

Found = dict[str, Any]
"""What a rank finds of a case: ``seconds`` of each timed step, figures by name, and maybe a ``failure``."""


@dataclass(frozen=True)
class Case:
    """One engine under one condition.

    Attributes:
        workload: a name in :data:`benchmarks.workloads.WORKLOADS`.
        engine: a name that :func:`benchmarks.engines.find_engine` finds.
        np: number of ranks.
        controller: what starts them.
        at: words of the suite's axes, such as the stage, that rows which are compared have in common.
        options: of the engine, and those of the worker: ``passes``, micro-batches of a step; ``recompute``, each inner block in the
            backward pass.
        sizes: of the workload, where they are not its defaults.
    """

    workload: str
    engine: str
    np: int = 2
    controller: str = "gloo"
    at: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def condition(self) -> dict[str, Any]:
        """What rows that are compared have in common."""
        return {"workload": self.workload, "np": self.np, "controller": self.controller, **self.at}


@dataclass(frozen=True)
class MeasuredJob(RankJob):
    """Cases of a suite on the same ranks.

    Attributes:
        suite: its name.
        cases: in this order.
        steps: that are timed of each case.
        seed: of the weights and the samples.
        device: ``cpu`` or ``cuda``.
    """

    worker = "benchmarks.worker:measure"

    suite: str
    cases: tuple[Case, ...]
    steps: int
    seed: int
    device: str


@dataclass
class Row:
    """What was found out about a case.

    Attributes:
        case: which.
        seconds: of a step, in each round.
        losses: the mean over the ranks after each job.
        figures: everything else by name, of each rank.
        failure: why something is missing, in one line.
    """

    case: Case
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    figures: dict[str, list[Any]] = field(default_factory=dict)
    failure: str | None = None

    def add(
        self, ranks: Sequence[Mapping[str, Any]], average: Callable[[list[float]], float] | None = None
    ) -> None:
        """Adds what the ranks of a job found: the ``average`` of its steps is a round, or without one each step is.

        What communication threads free counts until its address is allocated again, so of several counts the least is nearest.
        """
        self.failure = next((rank["failure"] for rank in ranks if rank.get("failure")), self.failure)
        steps = slowest(rank.get("seconds", ()) for rank in ranks)
        self.seconds += steps if average is None or not steps else [average(steps)]
        if any("loss" in rank for rank in ranks):
            self.losses.append(statistics.fmean(rank["loss"] for rank in ranks))
        for name in set(ranks[0]) - {"seconds", "failure"}:
            found, before = [rank.get(name) for rank in ranks], self.figures.get(name)
            if before is not None and name.endswith("bytes"):
                found = [min(pair) if None not in pair else None for pair in zip(found, before)]
            self.figures[name] = found

    def over(self, name: str, reduce: Callable[[list[Any]], Any] = max) -> Any:
        """A figure, over the ranks; None where it is missing."""
        values = [value for value in self.figures.get(name, ()) if value is not None]
        return reduce(values) if values else None

    @property
    def step(self) -> Quartiles | None:
        """Seconds of a step over the rounds."""
        return quartiles(self.seconds) if self.seconds and not self.failure else None

    def peer(self, rows: Sequence[Row], engine: str) -> Row | None:
        """The row of an engine under the same condition."""
        same = (row for row in rows if row.case.condition == self.case.condition)
        return next((row for row in same if row.case.engine == engine), None)

    def ratio(self, other: Row | None) -> Quartiles | None:
        """The time of a step as a ratio to another row's in the same round, over the rounds."""
        return None if other is None else quartiles_of_ratios(self.seconds, other.seconds)

    def peak_ratio(self, other: Row | None, figure: str = "peak_bytes") -> float | None:
        """A figure, the largest of all ranks, as a ratio to another row's."""
        own, base = self.over(figure), other.over(figure) if other is not None else None
        return own / base if own is not None and base else None

    def same(self, other: Row | None, *figures: str) -> list[bool] | None:
        """Whether each of these figures is, on every rank, that of another row; None where a row has none."""
        if other is None or not self.figures or not other.figures:
            return None
        return [self.figures[name] == other.figures[name] for name in figures]


def ratio_to(engine: str, figure: str) -> Callable[[Row, Sequence[Row]], float | None]:
    """A figure as a ratio to that of an engine under the same condition."""
    return lambda row, rows: row.peak_ratio(row.peer(rows, engine), figure)


def figure(title: str, name: str, form: Form = "", over: Callable[[list[Any]], Any] = max) -> Column:
    """The column of a figure of the rows, by default the largest of all ranks."""
    return Column(title, lambda row: row.over(name, over), form, key=name)
