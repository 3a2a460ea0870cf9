"""The plan: which jobs, in which order; and the statistics: what their times say.

A machine gets slower and faster while it measures. So jobs of different engines alternate (A B C, then C B A), each ratio is
taken between the jobs of one such *pair*, side by side in time, and what is told is the median over pairs with its
quartiles. The time of a step is that of the slowest rank, the time of a job the median over its steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.job import Answer, Job
from hvd_ckpt.bench.launch import JobError, rank_environment, run_job
from hvd_ckpt.runtime import threads_per_rank

__all__ = ["Case", "Plan", "Quartiles", "job_seconds", "quartiles", "ratios"]


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least one value, interpolated between neighbours (with one value, all three are it)."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


def job_seconds(ranks: Sequence[Sequence[float]]) -> float:
    """A job's step time: the median over steps of the slowest rank's time, from the seconds of each rank's steps."""
    slowest: list[float] = [max(step) for step in zip(*ranks, strict=True)]
    return float(statistics.median(slowest))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of step times in each pair that both engines have finished."""
    return [one / other for one, other in zip(ours, theirs)]


@dataclass
class Case:
    """One workload on one number of ranks over one controller, and what each engine's jobs gave.

    Attributes:
        seconds: for each engine, the step time of its job in each pair, in order.
        gradient_bytes: for each engine, the most bytes that a rank held for gradients.
        threads: CPU threads of each rank.
        failures: for each engine that failed, why.
    """

    workload: str
    size: int
    controller: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    gradient_bytes: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def step_seconds(self, engine: str) -> Quartiles | None:
        """The engine's step time over its jobs."""
        return quartiles(self.seconds[engine]) if self.seconds.get(engine) else None

    def ratio(self, engine: str, other: str) -> Quartiles | None:
        """The engine's step time as a ratio to another's, over the pairs."""
        values = ratios(self.seconds.get(engine, []), self.seconds.get(other, []))
        return quartiles(values) if values else None

    def add(self, engine: str, answers: Sequence[Answer]) -> None:
        """Takes in what the ranks of one job of an engine have measured."""
        times = job_seconds([answer.seconds[self.workload] for answer in answers])
        self.seconds.setdefault(engine, []).append(times)
        self.threads = answers[0].threads
        if self.workload in answers[0].gradient_bytes:
            self.gradient_bytes[engine] = max(answer.gradient_bytes[self.workload] for answer in answers)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        engines: names in the registry of engines, or ``module:Class``.
        sizes: numbers of ranks.
        controllers: ``gloo``, ``mpi``.
        workloads: names of workloads; one job times all of them in turn.
        pairs: jobs per engine, number of ranks and controller.
        steps: timed steps per job and workload; None for each workload's own.
        timeout: seconds after which a job counts as hanging.
        folder: where jobs leave their logs.
    """

    engines: tuple[str, ...]
    sizes: tuple[int, ...]
    controllers: tuple[str, ...]
    workloads: tuple[str, ...]
    pairs: int
    steps: int | None
    timeout: float
    folder: Path

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        return len(self.engines) * len(self.sizes) * len(self.controllers) * self.pairs

    def run(self, listener: Callable[[str], object] = lambda what: None) -> list[Case]:
        """Run all jobs, one at a time; ``listener`` hears of each before it starts. An engine that fails is left out."""
        cases = []
        for size in self.sizes:
            for controller in self.controllers:
                group = [Case(workload, size, controller) for workload in self.workloads]
                self._run_group(group, size, controller, listener)
                cases += group
        return cases

    def _run_group(
        self, cases: list[Case], size: int, controller: str, listener: Callable[[str], object]
    ) -> None:
        environment = rank_environment(threads_per_rank(size))
        for pair, engine in self._order():
            if engine in cases[0].failures:
                continue
            name = f"np{size}-{controller}-pair{pair + 1}-{engine}"
            listener(f"{size} ranks over {controller}, pair {pair + 1} of {self.pairs}, {engine}")
            folder = self.folder / name.replace(":", "_")
            job = Job(folder, size, engine, self.workloads, self.steps, memory=pair == 0)
            try:
                answers = run_job(job, controller, environment, self.timeout)
            except JobError as error:
                for case in cases:
                    case.failures[engine] = str(error)
                continue
            for case in cases:
                case.add(engine, answers)

    def _order(self) -> Iterator[tuple[int, str]]:
        for pair in range(self.pairs):
            for engine in self.engines if pair % 2 == 0 else self.engines[::-1]:
                yield pair, engine
