"""A comparison from options to report: the reference, each engine's checks, then timed jobs in alternating order."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.compare import scenarios  # noqa: F401  # whose classes enter the catalogue
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings, make_cells
from hvd_ckpt.app.compare.launch import Event, Failure, Launcher, Trainings
from hvd_ckpt.app.compare.report import make_report
from hvd_ckpt.app.compare.runner.engines import ENGINES, HvdCkpt, find_engine
from hvd_ckpt.app.compare.runner.report import Report
from hvd_ckpt.app.compare.runner.settings import check_devices
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.compare.verdict import add_ratios, judge
from hvd_ckpt.app.compare.worker import REFERENCE, EngineJob
from hvd_ckpt.app.compare.workloads import CATALOG
from hvd_ckpt.distributed.precision import apex_unavailable
from hvd_ckpt.processes.runtime import threads_per_rank

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.command import CompareSettings
    from hvd_ckpt.app.compare.runner.options import BenchRun

NOTHING = "nothing"  # in place of a list of workloads or scenarios
DEFAULT = [name for name, kind in ENGINES.items() if kind is HvdCkpt or not issubclass(kind, HvdCkpt)]
"""The engines that are compared where no others are asked for: this library as it comes, and all others."""

Listener = Callable[[str, Event], object]


class Comparison:
    """A comparison: which engines train which cells.

    Args:
        options: as they are given.
        run: its folder is made for the jobs when all options are checked.

    Raises:
        BadArgument: an option is wrong, or options do not go together.
        ModuleNotFoundError: a workload needs a package that is not installed.
    """

    def __init__(self, options: CompareSettings, run: BenchRun) -> None:
        self.engines, self.subject = options.engines or DEFAULT, options.subject or "hvd_ckpt"
        if self.subject not in self.engines:
            raise BadArgument(
                f"--subject {self.subject} is not among the engines {', '.join(self.engines)}: add it, or judge another"
            )
        self.size = options.np
        check_devices(options.device, self.size)
        no_apex = apex_unavailable() if options.precision.startswith("apex") else None
        if no_apex:
            raise BadArgument(f"--precision {options.precision}: {no_apex}; --precision fp16 needs no Apex")
        reasons = {engine: find_engine(engine).unavailable() for engine in self.engines}
        absent = {engine: reason for engine, reason in reasons.items() if reason is not None}
        if self.subject in absent:
            raise BadArgument(f"{self.subject} cannot run here: {absent[self.subject]}")
        segments = options.chunks or ((2,) if options.quick else (1, 2, 4))
        self.cells = make_cells(_variants(options), segments)
        if not self.cells:
            raise BadArgument(
                f"there is nothing to compare: these workloads and scenarios have no --variants {','.join(options.variants)} in "
                f"--precision {options.precision}"
            )
        shared = ("steps", "seed", "scale", "text", "precision", "device")
        self.settings = TrainingSettings(**{name: getattr(options, name) for name in shared})
        self.threads = threads_per_rank(self.size)
        self.launcher = Launcher(options.controller, self.size, options.timeout, self.threads)
        self._options, self._run, self._folder = options, run, run.jobs
        self._remarks = [f"{engine} is absent: {reason}" for engine, reason in absent.items()]
        self._trained = {engine: self._cells_of(engine) for engine in self.engines if engine not in absent}

    @property
    def trainings(self) -> int:
        """How many cells are trained: each to check it, and those of real workloads once in each timed pass."""
        cells = [cell for cells in self._trained.values() for cell in cells]
        return len(cells) + self._options.passes * sum(not CATALOG[cell.workload].small for cell in cells)

    def run(self, listener: Listener) -> Report:
        """Makes the comparison; ``listener`` hears of every event and where it happens.

        Raises:
            BadArgument: the reference cannot be computed, or a chain has fewer blocks than segments asked for.
        """
        with self.launcher:
            workloads = self._references(listener)
            found = {}
            for engine, cells in self._trained.items():
                job = self._job("check", engine, cells, checks=True)
                found[engine] = self.launcher.train(job, functools.partial(listener, f"checking {engine}"))
            self._time(found, listener)
        results = [
            judge(cell, engine, outcomes[cell], self.settings.precision)
            for cell in self.cells
            for engine, outcomes in found.items()
            if cell in outcomes
        ]
        add_ratios(results)
        return make_report(
            self._run,
            results,
            workloads,
            subject=self.subject,
            title=f"{self.size} ranks over {self._options.controller}, {self.settings.precision}",
            facts={
                "np": self.size,
                "engines": ", ".join(self.engines),
                "scale": self.settings.scale,
                "threads per rank": self.threads,
            },
            remarks=self._remarks,
        )

    def _references(self, listener: Listener) -> dict[str, dict[str, Any]]:
        """Computes the references; returns what a report says of each workload."""
        job = self._job("compute", REFERENCE, self.cells)
        events, failure = self.launcher.start(job, functools.partial(listener, "reference"))
        if failure:
            raise BadArgument(f"the reference cannot be computed: {failure.message} (log in {job.folder})")
        told = {event["workload"]: event for event in events if event["event"] == "reference"}
        for cell in self.cells:
            layers = told[cell.workload]["layers"]
            if cell.chunks > layers and not CATALOG[cell.workload].small:
                raise BadArgument(
                    f"{cell.chunks} chunks are too many for {cell.workload}: it has {layers} blocks"
                )
        return told

    def _time(self, found: dict[str, dict[Cell, Trainings | Failure]], listener: Listener) -> None:
        """Times each engine's real workloads that have a result, and adds these trainings to it. A cell may still fail."""
        for number, engine in alternating(list(found), self._options.passes):
            before = {
                cell: outcome
                for cell, outcome in found[engine].items()
                if not (CATALOG[cell.workload].small or isinstance(outcome, Failure))
            }
            where = f"timing {engine}, pass {number + 1} of {self._options.passes}"
            job = self._job(f"time{number + 1}", engine, before)
            for cell, timed in self.launcher.train(job, functools.partial(listener, where)).items():
                found[engine][cell] = timed if isinstance(timed, Failure) else before[cell] + timed

    def _cells_of(self, engine: str) -> list[Cell]:
        """The cells that an engine trains; notes those that it refuses by design."""
        kind, cells = find_engine(engine), list[Cell]()
        for cell in self.cells:
            refused = kind().refuses(CATALOG[cell.workload])
            if refused:
                self._remarks.append(f"{engine}, {cell.workload} {cell.variant} is left out: {refused}")
            else:
                cells.append(cell)
        return cells

    def _job(self, name: str, engine: str, cells: Iterable[Cell], checks: bool = False) -> EngineJob:
        return EngineJob(
            folder=self._folder / f"{name}-{engine}".replace(":", "-"),
            references=self._folder,
            engine=engine,
            cells=tuple(cells),
            size=self.size,
            settings=self.settings,
            checks=checks,
        )


def _variants(options: CompareSettings) -> dict[str, tuple[str, ...]]:
    """For each chosen workload and scenario, the variants that mean something for it."""
    chosen = {}
    for option, given, small in (
        ("--workloads", options.workloads, False),
        ("--scenarios", options.scenarios, True),
    ):
        known = [name for name, kind in CATALOG.items() if kind.small == small]
        names = known if given is None else split_names(option, given, (*known, NOTHING))
        for name in (name for name in names if name != NOTHING):
            kind = CATALOG[name]
            for package in kind.requires:
                if importlib.util.find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)
            if kind.precisions is None or options.precision in kind.precisions:
                chosen[name] = tuple(variant for variant in options.variants if variant in kind.variants)
    return chosen
