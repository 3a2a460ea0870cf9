"""A comparison from options to report: the reference, each engine's checks, then timed jobs in alternating order."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.launch import Launcher, Trainings
from hvd_ckpt.app.compare.reference import compute_reference
from hvd_ckpt.app.compare.report import make_report
from hvd_ckpt.app.compare.runner.engines import ENGINES, find_engine
from hvd_ckpt.app.compare.runner.jobs import Event, JobError, reason
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.runner.report import Report
from hvd_ckpt.app.compare.runner.settings import check_devices
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.compare.verdict import add_ratios, judge
from hvd_ckpt.app.compare.worker import EngineJob
from hvd_ckpt.app.compare.workloads import CATALOG
from hvd_ckpt.distributed.precision import apex_unavailable
from hvd_ckpt.processes.runtime import threads_per_rank

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.command import CompareSettings

NOTHING = "nothing"  # in place of a list of workloads or scenarios

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
        self.engines, self.subject = options.engines or [*ENGINES], options.subject or "hvd_ckpt"
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
        self.cells = tuple(_cells(options))
        if not self.cells:
            raise BadArgument(
                f"there is nothing to compare: these workloads and scenarios have no --variants {','.join(options.variants)} in "
                f"--precision {options.precision}"
            )
        shared = {name: getattr(options, name) for name in ("steps", "seed", "text", "precision", "device")}
        self.settings = TrainingSettings(**shared, scale="quick" if options.quick else "default")
        self.threads = threads_per_rank(self.size)
        self.launcher = Launcher(options.controller, self.size, options.timeout, self.threads)
        self._options, self._run, self._folder = options, run, run.jobs
        self._remarks = [f"{engine} is absent: {reason}" for engine, reason in absent.items()]
        self._present = [engine for engine in self.engines if engine not in absent]

    @property
    def trainings(self) -> int:
        """How many cells are trained: each to check it, and those of real workloads once in each timed pass."""
        timed = sum(not CATALOG[cell.workload].small for cell in self.cells)
        return len(self._present) * (len(self.cells) + self._options.passes * timed)

    def run(self, listener: Listener) -> Report:
        """Makes the comparison; ``listener`` hears of every event and where it happens.

        Raises:
            BadArgument: the reference cannot be computed, or a chain has fewer blocks than segments asked for.
        """
        with self.launcher:
            workloads = self._references(listener)
            found = {}
            for engine in self._present:
                job = self._job("check", engine, self.cells, checks=True)
                found[engine] = self.launcher.train(job, functools.partial(listener, f"checking {engine}"))
            self._time(found, listener)
        results = [
            judge(cell, engine, outcomes[cell], self.settings.precision)
            for cell in self.cells
            for engine, outcomes in found.items()
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
        """Has a process compute the references for the ranks to read; returns what a report says of each workload."""
        told: dict[str, dict[str, Any]] = {}
        self._folder.mkdir(parents=True)
        # Of the fork server of the ranks, with their number of threads.
        with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            for name in dict.fromkeys(cell.workload for cell in self.cells):
                listener(f"reference of {name}", {"event": "step", "rank": 0})
                computed = pool.submit(compute_reference, name, self.size, self.settings, self._folder)
                try:
                    told[name] = computed.result()
                except Exception as error:
                    raise BadArgument(
                        f"the reference of {name} cannot be computed: {reason(error)}"
                    ) from None
        for cell in self.cells:
            layers = told[cell.workload]["layers"]
            if cell.chunks > layers and not CATALOG[cell.workload].small:
                raise BadArgument(
                    f"{cell.chunks} chunks are too many for {cell.workload}: it has {layers} blocks"
                )
        return told

    def _time(self, found: dict[str, dict[Cell, Trainings | JobError]], listener: Listener) -> None:
        """Times each engine's real workloads that have a result, and adds these trainings to it. A cell may still fail."""
        for number, engine in alternating(list(found), self._options.passes):
            before = {
                cell: outcome
                for cell, outcome in found[engine].items()
                if not (CATALOG[cell.workload].small or isinstance(outcome, JobError))
            }
            where = f"timing {engine}, pass {number + 1} of {self._options.passes}"
            job = self._job(f"time{number + 1}", engine, before)
            for cell, timed in self.launcher.train(job, functools.partial(listener, where)).items():
                found[engine][cell] = timed if isinstance(timed, JobError) else before[cell] + timed

    def _job(self, name: str, engine: str, cells: Iterable[Cell], checks: bool = False) -> EngineJob:
        folder = self._folder / f"{name}-{engine}".replace(":", "-")
        return EngineJob(folder, self.size, self._folder, tuple(cells), self.settings, engine, checks)


def _cells(options: CompareSettings) -> Iterator[Cell]:
    """Each chosen workload and scenario with each variant that means something for it and, if that has segments, their numbers."""
    segments = options.chunks or ((2,) if options.quick else (1, 2, 4))
    for option, given, small in (
        ("--workloads", options.workloads, False),
        ("--scenarios", options.scenarios, True),
    ):
        known = [name for name, kind in CATALOG.items() if kind.small == small]
        try:
            names = known if given is None else split_names(given, (*known, NOTHING))
        except ValueError as error:
            raise BadArgument(f"{option}: {error}") from None
        for name in (name for name in names if name != NOTHING):
            kind = CATALOG[name]
            for package in kind.requires:
                if importlib.util.find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)
            if kind.precisions is None or options.precision in kind.precisions:
                for variant in (variant for variant in options.variants if variant in kind.variants):
                    yield from (Cell(name, variant, n) for n in ((0,) if variant == "none" else segments))
