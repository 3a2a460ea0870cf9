"""One comparison from settings to report: the reference first, then each engine's jobs in alternating order."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ckpt.comparison.cells import Cell
from hvd_ckpt.comparison.events import Event
from hvd_ckpt.comparison.job import Job
from hvd_ckpt.comparison.launch import Failure, Launcher
from hvd_ckpt.comparison.report import Report, machine_facts
from hvd_ckpt.comparison.verdict import add_ratios, judge
from hvd_ckpt.comparison.workloads import WORKLOADS

__all__ = ["Comparison", "ComparisonError"]


class ComparisonError(Exception):
    """The comparison cannot be made at all; the message says why in one line."""


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        engines: names in the registry of engines, or ``module:Class``.
        cells: what each engine trains.
        subject: the engine that must be right.
        size: number of ranks.
        controller: ``gloo`` or ``mpi``.
        threads: CPU threads of each rank.
        steps: steps of each training run.
        passes: jobs per engine; the last one also measures memory. Engines alternate: A B C, C B A, ...
        scale, seed, text: of the workloads.
        timeout: seconds without a step after which a job hangs.
        folder: where everything is written.
    """

    engines: tuple[str, ...]
    cells: tuple[Cell, ...]
    subject: str
    size: int
    controller: str
    threads: int
    steps: int
    passes: int
    scale: str
    seed: int
    text: str | None
    timeout: float
    folder: Path

    @property
    def trainings(self) -> int:
        """How many training runs the comparison takes: each cell once per pass, and once more for memory."""
        return len(self.engines) * len(self.cells) * (self.passes + 1)

    def run(self, listener: Callable[[str, Event], object] = lambda where, event: None) -> Report:
        """Make the comparison and write its report; ``listener`` hears of every event and where it happens.

        Raises:
            ComparisonError: the reference cannot be computed, or a chain has fewer blocks than segments asked for.
        """
        start = time.monotonic()
        workloads = self._references(listener)
        passes: dict[str, list[list[Event]]] = {engine: [] for engine in self.engines}
        failures: dict[str, dict[str, Failure]] = {engine: {} for engine in self.engines}
        for number in range(1, self.passes + 1):
            order = self.engines if number % 2 else self.engines[::-1]
            for engine in order:
                cells = [cell.key for cell in self.cells if cell.key not in failures[engine]]
                job = self._job(
                    f"pass{number}-{_folder_name(engine)}", engine, cells, memory=number == self.passes
                )
                where = f"pass {number} of {self.passes}, {engine}"
                launcher = self._launcher(functools.partial(listener, where))
                outcome = launcher.train(job)
                passes[engine].append(outcome.events)
                failures[engine].update(outcome.failures)
        results = [
            judge(cell, engine, passes[engine], failures[engine].get(cell.key), self.size)
            for cell in self.cells
            for engine in self.engines
        ]
        add_ratios(results)
        report = Report(
            settings=self._settings(),
            facts=machine_facts(self.threads),
            workloads=workloads,
            results=results,
            subject=self.subject,
            seconds=time.monotonic() - start,
        )
        report.save(self.folder)
        return report

    def _references(self, listener: Callable[[str, Event], object]) -> dict[str, dict[str, Any]]:
        """Compute the references; returns what they tell about each workload."""
        job = self._job("reference", "reference", [cell.key for cell in self.cells], memory=False)
        outcome = self._launcher(functools.partial(listener, "reference")).reference(job)
        if outcome.failures:
            failure = outcome.failures["reference"]
            raise ComparisonError(
                f"the reference cannot be computed: {failure.message} (log in {job.folder})"
            )
        facts = {event["workload"]: event for event in outcome.events if event["event"] == "reference"}
        for cell in self.cells:
            layers = facts[cell.workload]["layers"]
            if cell.chunks > layers:
                raise ComparisonError(
                    f"{cell.chunks} chunks are too many for {cell.workload}: it has {layers} blocks"
                )
        return {
            name: {"title": WORKLOADS[name].title, "line": fact["line"], "losses": fact["losses"]}
            for name, fact in facts.items()
        }

    def _job(self, name: str, engine: str, cells: list[str], *, memory: bool) -> Job:
        return Job(
            folder=self.folder / "jobs" / name,
            references=self.folder / "jobs" / "reference",
            engine=engine,
            cells=tuple(cells),
            size=self.size,
            steps=self.steps,
            seed=self.seed,
            scale=self.scale,
            text=self.text,
            memory=memory,
        )

    def _launcher(self, listener: Callable[[Event], object]) -> Launcher:
        return Launcher(self.controller, self.timeout, {"OMP_NUM_THREADS": str(self.threads)}, listener)

    def _settings(self) -> dict[str, Any]:
        return {
            "np": self.size,
            "controller": self.controller,
            "engines": ", ".join(self.engines),
            "scale": self.scale,
            "steps": self.steps,
            "passes": self.passes,
            "seed": self.seed,
            "text": self.text or "source of the Python standard library",
        }


def _folder_name(engine: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in engine)
