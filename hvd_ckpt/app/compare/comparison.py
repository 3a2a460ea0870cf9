"""A comparison from settings to report: the reference, each engine's checks, then timed jobs in alternating order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.catalog import CATALOG
from hvd_ckpt.app.compare.cells import Cell, Settings, Variant, find_variant
from hvd_ckpt.app.compare.launch import Event, Failure, Launcher
from hvd_ckpt.app.compare.report import make_report, make_stage_report
from hvd_ckpt.app.compare.runner.engines import find_engine
from hvd_ckpt.app.compare.runner.report import Report, machine_facts
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.compare.verdict import add_ratios, judge
from hvd_ckpt.app.compare.worker import REFERENCE, Job, folder_name

Listener = Callable[[str, Event], object]


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison.

    Attributes:
        engines: names in the registry of engines, or ``module:Class``.
        cells: what each engine trains; planned ones only those engines that have plans.
        subject: the engine that must be right.
        size: number of ranks.
        controller: ``gloo`` or ``mpi``.
        threads: CPU threads of each rank.
        passes: timed jobs per engine, in alternating order: A B C, C B A, ... Scenarios are not timed.
        settings: of each training run.
        timeout: seconds without a step after which a job hangs.
        folder: of the jobs and their logs.
    """

    engines: tuple[str, ...]
    cells: tuple[Cell, ...]
    subject: str
    size: int
    controller: str
    threads: int
    passes: int
    settings: Settings
    timeout: float
    folder: Path

    @property
    def trainings(self) -> int:
        """How many training runs the comparison takes: each cell twice to check it, and real workloads once in each timed pass."""
        return sum(
            2 + (0 if CATALOG[cell.workload].small else self.passes)
            for engine in self.engines
            if find_engine(engine).unavailable() is None
            for cell in self._cells_of(engine)
        )

    def run(self, listener: Listener) -> Report:
        """Makes the comparison; ``listener`` hears of every event and where it happens.

        Raises:
            BadArgument: the reference cannot be computed, a chain has fewer blocks than segments asked for, or the
                subject cannot run here.
        """
        reasons = {engine: find_engine(engine).unavailable() for engine in self.engines}
        absent = {engine: reason for engine, reason in reasons.items() if reason is not None}
        if self.subject in absent:
            raise BadArgument(f"{self.subject} cannot run here: {absent[self.subject]}")
        present = [engine for engine in self.engines if engine not in absent]
        with Launcher(self.controller, self.size, self.timeout, self.threads) as launcher:
            workloads = self._references(launcher, listener)
            checks, failures = self._check(launcher, present, listener)
            left_out = {engine: _left_out(events) for engine, events in checks.items()}
            # What an engine has left out has no result to judge, and is not timed.
            cells = {
                engine: [cell for cell in self._cells_of(engine) if cell.key not in left_out[engine]]
                for engine in present
            }
            timed = self._time(launcher, cells, failures, listener)
        results = [
            judge(
                cell,
                engine,
                checks[engine],
                timed[engine],
                failures[engine].get(cell.key),
                size=self.size,
                precision=self.settings.precision,
            )
            for cell in self.cells
            for engine in present
            if cell in cells[engine]
        ]
        add_ratios(results)
        told = self._told()
        facts = machine_facts(self.threads, told)
        if CATALOG[self.cells[0].workload].staged:
            return make_stage_report(results, workloads, self.subject, told, facts)
        return make_report(
            results,
            workloads,
            self.subject,
            told,
            facts,
            absent=absent,
            left_out=[
                f"{engine}, {cell.workload} {cell.variant} is left out: {left_out[engine][cell.key]}"
                for cell in self.cells
                for engine in present
                if cell.key in left_out[engine]
            ],
        )

    def _references(self, launcher: Launcher, listener: Listener) -> dict[str, dict[str, Any]]:
        """Computes the references; returns what a report says of each workload."""
        job = self._job("reference", REFERENCE, list(self.cells))
        outcome = launcher.reference(job, functools.partial(listener, "reference"))
        if outcome.failures:
            failure = outcome.failures["reference"]
            raise BadArgument(f"the reference cannot be computed: {failure.message} (log in {job.folder})")
        facts = {event["workload"]: event for event in outcome.events if event["event"] == "reference"}
        for cell in self.cells:
            layers = facts[cell.workload]["layers"]
            if cell.chunks > layers and not CATALOG[cell.workload].small:
                raise BadArgument(
                    f"{cell.chunks} chunks are too many for {cell.workload}: it has {layers} blocks"
                )
        return {
            name: {
                "title": CATALOG[name].title,
                "line": fact["line"],
                "losses": fact["losses"],
                "small": CATALOG[name].small,
            }
            for name, fact in facts.items()
        }

    def _check(
        self, launcher: Launcher, engines: list[str], listener: Listener
    ) -> tuple[dict[str, list[Event]], dict[str, dict[str, Failure]]]:
        """Trains every cell twice with each engine, looking closely; returns the events and what failed."""
        events, failures = {}, {}
        for engine in engines:
            job = self._job(f"check-{folder_name(engine)}", engine, self._cells_of(engine), checks=True)
            outcome = launcher.train(job, functools.partial(listener, f"checking {engine}"))
            events[engine], failures[engine] = outcome.events, outcome.failures
        return events, failures

    def _time(
        self,
        launcher: Launcher,
        cells: dict[str, list[Cell]],
        failures: dict[str, dict[str, Failure]],
        listener: Listener,
    ) -> dict[str, list[list[Event]]]:
        """Times each engine's real workloads that did not fail; returns the events of each pass. A cell may still fail."""
        passes: dict[str, list[list[Event]]] = {engine: [] for engine in cells}
        for number, engine in alternating(list(cells), self.passes):
            left = [
                cell
                for cell in cells[engine]
                if cell.key not in failures[engine] and not CATALOG[cell.workload].small
            ]
            job = self._job(f"time{number + 1}-{folder_name(engine)}", engine, left)
            where = f"timing {engine}, pass {number + 1} of {self.passes}"
            outcome = launcher.train(job, functools.partial(listener, where))
            passes[engine].append(outcome.events)
            failures[engine].update(outcome.failures)
        return passes

    def _cells_of(self, engine: str) -> list[Cell]:
        """The cells that mean something for an engine."""
        kind = find_engine(engine)

        def takes(variant: Variant) -> bool:
            return (
                variant.schedule in kind.schedules
                if variant.schedule
                else kind.plans or variant.budget is None
            )

        return [cell for cell in self.cells if takes(find_variant(cell.variant))]

    def _job(self, name: str, engine: str, cells: list[Cell], *, checks: bool = False) -> Job:
        return Job(
            folder=self.folder / name,
            references=self.folder / "reference",
            engine=engine,
            cells=tuple(cells),
            size=self.size,
            settings=self.settings,
            checks=checks,
        )

    def _told(self) -> dict[str, Any]:
        """The settings as plain values for a report."""
        return {
            "np": self.size,
            "controller": self.controller,
            "engines": ", ".join(self.engines),
            "passes": self.passes,
            **dataclasses.asdict(self.settings),
            "text": self.settings.text or "source of the Python standard library",
        }


def _left_out(events: list[Event]) -> dict[str, str]:
    """The keys of the cells that have no plan, and why."""
    return {event["cell"]: event["reason"] for event in events if event["event"] == "left out"}
