"""A comparison from options to report: the reference, each engine's checks, then timed jobs in alternating order."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ckpt.app.cli.command_line import BadArgument, split_names
from hvd_ckpt.app.compare import divided, scenarios  # noqa: F401  # whose classes enter the catalogue
from hvd_ckpt.app.compare.cells import VARIANTS, Cell, Settings, make_cells
from hvd_ckpt.app.compare.launch import Event, Launcher, Outcome
from hvd_ckpt.app.compare.report import make_report
from hvd_ckpt.app.compare.runner.engines import ENGINES, HvdCkpt, find_engine
from hvd_ckpt.app.compare.runner.report import Report, machine_facts
from hvd_ckpt.app.compare.runner.settings import check_devices
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.compare.verdict import add_ratios, judge
from hvd_ckpt.app.compare.worker import REFERENCE, Job
from hvd_ckpt.app.compare.workloads import CATALOG
from hvd_ckpt.distributed.precision import apex_unavailable
from hvd_ckpt.processes.runtime import threads_per_rank
from hvd_ckpt.utils.extras import explain_import_error

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
    """

    def __init__(self, options: CompareSettings, run: BenchRun) -> None:
        whole = not options.divided
        self.engines = options.engines or (DEFAULT if whole else divided.ENGINES[options.divided])
        self.subject = options.subject or ("hvd_ckpt" if whole else self.engines[0])
        if self.subject not in self.engines:
            raise BadArgument(
                f"--subject {self.subject} is not among the engines {', '.join(self.engines)}: add it, or judge another"
            )
        self.size = options.stages or options.tensor or options.size
        check_devices(options.device, self.size)
        no_apex = apex_unavailable() if options.precision.startswith("apex") else None
        if no_apex:
            raise BadArgument(f"--precision {options.precision}: {no_apex}; --precision fp16 needs no Apex")
        reasons = {engine: find_engine(engine).unavailable() for engine in self.engines}
        self.absent = {engine: reason for engine, reason in reasons.items() if reason is not None}
        if self.subject in self.absent:
            raise BadArgument(f"{self.subject} cannot run here: {self.absent[self.subject]}")
        preset = options.preset
        self.cells = make_cells(_variants(options), options.chunks or (preset.chunks if whole else (2,)))
        if not self.cells:
            raise BadArgument(
                f"there is nothing to compare: these workloads and scenarios have no --variants {','.join(options.variants)} in "
                f"--precision {options.precision}"
            )
        shared = {name: getattr(options, name) for name in ("scale", "text", "precision", "device")}
        self.settings = Settings(options.steps or preset.steps, options.seed, **shared)
        self.passes = preset.passes if options.passes is None else options.passes
        self.threads = threads_per_rank(self.size) if whole else 1
        self.launcher = Launcher(
            options.controller, self.size, options.timeout or preset.timeout, self.threads
        )
        self.told = {
            "np": self.size,
            "controller": options.controller,
            "engines": ", ".join(self.engines),
            "passes": self.passes,
            **dataclasses.asdict(self.settings),
            "text": options.text or "source of the Python standard library",
        }
        self._folder = run.jobs
        self._left_out: list[str] = []
        self._trained = {
            engine: self._cells_of(engine) for engine in self.engines if engine not in self.absent
        }

    @property
    def trainings(self) -> int:
        """How many cells are trained: each to check it, and those of real workloads once in each timed pass."""
        cells = [cell for cells in self._trained.values() for cell in cells]
        return len(cells) + self.passes * sum(not CATALOG[cell.workload].small for cell in cells)

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
        precision = self.settings.precision
        results = [
            judge(cell, engine, outcome.trainings.get(cell, ()), outcome.failures.get(cell), precision)
            for cell in self.cells
            for engine, outcome in found.items()
            if cell in self._trained[engine]
        ]
        add_ratios(results)
        absent = [f"{engine} is absent: {reason}" for engine, reason in self.absent.items()]
        facts = machine_facts(self.threads, self.told)
        return make_report(results, workloads, self.subject, self.told, facts, absent + self._left_out)

    def _references(self, listener: Listener) -> dict[str, dict[str, Any]]:
        """Computes the references; returns what a report says of each workload."""
        job = self._job("reference", REFERENCE, self.cells)
        events, failure = self.launcher.reference(job, functools.partial(listener, "reference"))
        if failure:
            raise BadArgument(f"the reference cannot be computed: {failure.message} (log in {job.folder})")
        told = {event["workload"]: event for event in events if event["event"] == "reference"}
        for cell in self.cells:
            layers = told[cell.workload]["layers"]
            if cell.chunks > layers and not CATALOG[cell.workload].small:
                raise BadArgument(
                    f"{cell.chunks} chunks are too many for {cell.workload}: it has {layers} blocks"
                )
        kinds = {name: CATALOG[name] for name in told}
        return {
            name: {
                "title": kind.title,
                "small": kind.small,
                "line": told[name]["line"],
                "losses": told[name]["losses"],
            }
            for name, kind in kinds.items()
        }

    def _time(self, found: dict[str, Outcome], listener: Listener) -> None:
        """Times each engine's real workloads that have a result, and adds these trainings to it. A cell may still fail."""
        for number, engine in alternating(list(found), self.passes):
            outcome = found[engine]
            left = [cell for cell in self._trained[engine] if not CATALOG[cell.workload].small]
            job = self._job(
                f"time{number + 1}", engine, [cell for cell in left if cell not in outcome.failures]
            )
            where = f"timing {engine}, pass {number + 1} of {self.passes}"
            timed = self.launcher.train(job, functools.partial(listener, where))
            outcome.failures |= timed.failures
            for cell, trainings in timed.trainings.items():
                outcome.trainings[cell] += trainings

    def _cells_of(self, engine: str) -> list[Cell]:
        """The cells that an engine trains; notes those that it refuses by design."""
        kind, cells = find_engine(engine), list[Cell]()
        for cell in self.cells:
            schedule = VARIANTS[cell.variant].schedule
            refused: str | None = kind().refuses(CATALOG[cell.workload])  # type: ignore[arg-type]
            if refused:
                self._left_out.append(f"{engine}, {cell.workload} {cell.variant} is left out: {refused}")
            elif schedule is None or schedule in kind.schedules:
                cells.append(cell)
        return cells

    def _job(self, name: str, engine: str, cells: Sequence[Cell], checks: bool = False) -> Job:
        # An engine's name as a file system takes it.
        plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in engine)
        return Job(
            folder=self._folder / (name if engine == REFERENCE else f"{name}-{plain}"),
            references=self._folder / "reference",
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
        known = {
            name.removeprefix(f"{options.divided}-"): name
            for name, kind in CATALOG.items()
            if (kind.divided, kind.small) == (options.divided, small)
        }
        names = known if given is None else split_names(option, given, (*known, NOTHING))
        for name in (known[name] for name in names if name != NOTHING):
            kind = CATALOG[name]
            _check_packages(name, kind.requires)
            if kind.precisions is None or options.precision in kind.precisions:
                chosen[name] = tuple(variant for variant in options.variants if variant in kind.variants)
    return chosen


def _check_packages(workload: str, packages: tuple[str, ...]) -> None:
    """Bad argument where a package is missing that a workload needs."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            text = explain_import_error(ModuleNotFoundError(name=package))
            raise BadArgument(f"{workload}: {text or f'{package} is not installed'}")
