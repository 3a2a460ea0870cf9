"""A suite as data: its command, its jobs in alternating order, its table and its picture follow from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import click
import yaml
from pydantic import BeforeValidator, Field, create_model

from benchmarks.case import Case, Row
from hvd_ckpt.app.compare.runner.jobs import reason
from hvd_ckpt.app.compare.runner.options import BenchRun, Steps, bench_command
from hvd_ckpt.app.compare.runner.report import (
    MIB,
    Column,
    Report,
    device_name,
    quartiles_in_ms,
    results_of,
    save_figure,
    table_of,
)
from hvd_ckpt.app.compare.runner.settings import (
    CONTROLLERS,
    OF_DEVICE,
    BenchSettings,
    Controllers,
    Device,
    Seconds,
    check_devices,
    names_of,
    numbers_of,
)
from hvd_ckpt.app.compare.runner.stats import alternating
from hvd_ckpt.app.training.field_types import Count
from hvd_ckpt.utils.named import import_named

Compared = str | Callable[[Row, Sequence[Row]], Any]
"""An engine, to which the time of a step is a ratio, or from a row and all rows to a value: quartiles, a number or a text."""

STEP = "step ms: median over rounds, quartiles in brackets; a step ends when the slowest rank's does. "
WORKER = "benchmarks.worker:measure"
NOTES = (
    STEP + "Jobs alternate: A B C, then C B A.",
    "of NAME: the time of a step as a ratio to that engine's in the same round; median over rounds, quartiles in brackets. Below 1 "
    "is faster.",
)
TOGETHER = (
    STEP + "All engines are in the same processes and take turns step by step: A B C, then C B A.",
    NOTES[1],
)


@dataclass(frozen=True)
class Axis:
    """An option of a suite with several values, each of which makes cases.

    Attributes:
        help: of the option.
        values: by the words of the command line.
        default: some of these words, by default all of them.
    """

    help: str
    values: Mapping[str, Any]
    default: str = ""

    def word(self, value: Any) -> str:
        """The word of a value."""
        return next(word for word, known in self.values.items() if known == value)


@dataclass(frozen=True)
class Turn:
    """A job: its name, its rows, the columns whose probes measure, its timed steps, and the number of its round."""

    name: str
    rows: Sequence[Row]
    columns: Sequence[str | Column]
    steps: int
    number: int = 0


@dataclass(frozen=True)
class Suite:
    """Cases, what is measured of them, and how they are shown.

    Attributes:
        name: of the command.
        title: of the report.
        help: of the command.
        engines: by name; those that name the suite themselves follow.
        workloads: by name, what they are.
        chosen: ``workloads`` and ``engines`` that are run by default, if not all.
        columns: names in :data:`benchmarks.probes.PROBES`, or columns of figures that the suite's own worker finds.
        against: further columns by title.
        axes: further options by name.
        keeps: which cases there are; by default every engine with every workload and every value of the axes.
        options: of a case that has none so far, by default its values of the axes.
        sizes, quick_sizes: of each workload; ``--set`` changes them.
        np, controllers, rounds, steps, warm_up: defaults; ``quick`` has other ones by name.
        optimizer, lr, cosine: as in :class:`benchmarks.worker.MeasuredJob`.
        together: all engines of a condition are in one job, and a round is one step.
        apart: ``together``, but engines are examined before, each in a job of its own, so that what is timed was never profiled.
        threads: of each rank; by default this machine's processors are shared.
        notes: lines below the table, beside those of columns.
        average: of the steps of a job.
        sound: whether a row is as it must be; the exit status is 1 if one is not, or has failed.
        timed: seconds of steps are shown.
        within, launcher: the words of a command that runs the launcher of a case, and options of the launcher.
        worker: what the ranks call instead of :func:`benchmarks.worker.measure`; unless it is ``launched``, what is called here.
            Its engines and workloads are words of its own.
        draw: pictures of all rows in a folder, in place of :func:`draw`.
    """

    name: str
    title: str
    help: str
    engines: Sequence[str]
    workloads: Mapping[str, str]
    columns: Sequence[str | Column] = ()
    against: Mapping[str, Compared] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    keeps: Callable[[Case], bool] = lambda case: True
    options: Callable[[Case], Mapping[str, Any]] = lambda case: case.at
    chosen: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    quick_sizes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    np: str = "2,4"
    controllers: str = "gloo"
    rounds: int = 5
    steps: int = 5
    warm_up: int = 3
    quick: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    lr: float = 1e-3
    cosine: bool = False
    together: bool = False
    apart: bool = False
    threads: int | None = None
    notes: Sequence[str] = ()
    average: Callable[[list[float]], float] = statistics.median
    sound: Callable[[Row, Sequence[Row]], bool] = lambda row, rows: True
    timed: bool = True
    within: Callable[[Case], Sequence[str]] = lambda case: ()
    launcher: Callable[[Case], Sequence[str]] = lambda case: ()
    worker: str = WORKER
    launched: bool = True
    draw: Callable[[Path, Sequence[Row]], list[str]] | None = None

    @property
    def command(self) -> click.Command:
        """``python -m benchmarks NAME``."""

        def run(run: BenchRun, settings: Any) -> None:
            self.run(run, settings)

        run.__name__, run.__doc__ = self.name, self.help
        return bench_command(self.settings, width=180)(run)

    @property
    def settings(self) -> type[BenchSettings]:
        """What the command line says: the options of all suites, and the axes of this one."""

        def option(name: str, kind: Any, help: str, default: Any) -> tuple[Any, Any]:
            extra = {"quick": self.quick[name]} if name in self.quick else None
            return kind, Field(default, description=help, json_schema_extra=extra)

        Names = tuple[str, ...]
        engines, whose = names_of(self.engines), ""
        if self.worker == WORKER:
            engines = names_of(find="benchmarks.engines:find_engine")
            whose = ", or module:Class of your own; by default also those that name the suite themselves"
        controllers = Controllers if self.launched else Annotated[Names, names_of(CONTROLLERS)]
        workloads = Annotated[Names, names_of(self.workloads)]
        names = {name: ",".join(getattr(self, name)) for name in ("workloads", "engines")} | dict(self.chosen)
        fields: dict[str, Any] = {
            "np": option("np", Annotated[tuple[int, ...], numbers_of("ranks")], "Numbers of ranks.", self.np),
            "controller": option("controller", controllers, "What starts the ranks.", self.controllers),
            "workloads": option("workloads", workloads, "What is trained.", names["workloads"]),
            "engines": option("engines", Annotated[Names, engines], f"Engines{whose}.", names["engines"]),
        }  # fmt: skip
        for name, axis in self.axes.items():
            fields[name] = option(
                name, Annotated[Names, names_of(axis.values)], axis.help, axis.default or ",".join(axis.values)
            )
        if self.launched or self.rounds > 1:
            rounds = "Steps in turn." if self.together else "Jobs per engine, alternating."
            fields["rounds"] = option("rounds", Count, rounds, self.rounds)
        if self.launched:
            if not self.together:
                fields["steps"] = option("steps", Count, "Timed steps per job.", self.steps)
            fields["device"] = option("device", Device, OF_DEVICE, "cpu")
            fields["timeout"] = option("timeout", Seconds, "Seconds for one job.", 600.0)
        given = "Sizes of the workloads in place of the suite's, such as batch=16,layers=4."
        fields["set"] = option("set", Annotated[dict[str, Any] | None, BeforeValidator(_sizes)], given, None)
        quick = "Few ranks, few rounds, small models: whether it works, not how fast it is."
        fields["quick"] = option("quick", bool, quick, False)
        return create_model("Settings", __base__=BenchSettings, **fields)

    def cases(self, settings: Any) -> Iterator[Case]:
        """The cases of these settings, with the options and the sizes of this suite."""
        axes = [getattr(settings, name) for name in self.axes]
        places = itertools.product(settings.np, settings.controller, settings.workloads, *axes)
        for (size, controller, name, *words), engine in itertools.product(places, settings.engines):
            at = {axis: self.axes[axis].values[word] for axis, word in zip(self.axes, words)}
            sizes = ((settings.quick and self.quick_sizes) or self.sizes).get(name, {}) | (settings.set or {})
            case = Case(name, engine, size, controller, at, sizes=sizes)
            if self.keeps(case):
                yield dataclasses.replace(case, options=dict(self.options(case)))

    def run(self, run: BenchRun, settings: Any) -> None:
        """Runs all jobs, saves the report before each, prints it."""
        from benchmarks.engines import engines_for, find_engine

        check_devices(getattr(settings, "device", "cpu"), max(settings.np))
        left_out = {}
        if self.worker == WORKER:
            if settings.engines == tuple(self.engines):
                settings = settings.model_copy(update={"engines": (*settings.engines, *engines_for(self.name))})
            reasons = {engine: find_engine(engine).unavailable() for engine in settings.engines}
            left_out = {engine: why for engine, why in reasons.items() if why}
        rows = [Row(case) for case in self.cases(settings) if case.engine not in left_out]
        run.make_report = functools.partial(self.report, run, settings, rows, left_out)
        turns = [turn for groups in self.jobs(rows).values() for turn in self.turns(groups, settings)]
        with run.progress(len(turns)) as progress:
            for turn in turns:
                first = turn.rows[0].case
                where = [f"{first.np} ranks over {first.controller}"]
                where += [f"{name} {value}" for name, value in first.at.items()] if self.within(first) else []
                name = ", ".join([*filter(None, [turn.name]), *where])
                group = [row for row in turn.rows if not row.failure]
                if not group:
                    progress.start(f"{turn.name} has failed")
                    continue
                ranks = self.job(run, progress, name, group, turn)
                for row, found in zip(group, zip(*ranks)):
                    row.add(found, None if self.together else self.average)
                for row in group:
                    row.failure = run.failures.get(name, row.failure)
        run.finish(success=all(not row.failure and self.sound(row, rows) for row in rows))

    def job(self, run: BenchRun, progress: Steps, name: str, group: Sequence[Row], turn: Turn) -> Any:
        """What each rank finds of each row; nothing if the job fails."""
        from benchmarks.worker import MeasuredJob
        from hvd_ckpt.processes.runtime import threads_per_rank

        place = re.sub("[ :/]", "-", f"{name}-{turn.number + 1}")
        first, probed = group[0].case, tuple(name for name in turn.columns if isinstance(name, str))
        job = type("MeasuredJob", (MeasuredJob,), {"worker": self.worker})(
            run.jobs / place, first.np, tuple(row.case for row in group), probed, self.optimizer, self.lr, self.cosine,
            self.warm_up, turn.steps, self.together, turn.number, getattr(run.settings, "device", "cpu"),
        )  # fmt: skip
        what = f"{name}, round {turn.number + 1}"
        if self.launched:
            return progress.job(
                what, job, list[dict[str, Any]],
                name=name, controller=first.controller, threads=self.threads or threads_per_rank(first.np),
                within=self.within(first), options=self.launcher(first),
                environment={"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        progress.start(what)
        assert run.make_report is not None
        run.save(run.make_report())
        try:
            return [import_named("function", self.worker)(job)]
        except RuntimeError as error:
            run.failures[name] = reason(error)
            return []

    def turns(self, groups: Mapping[str, list[Row]], settings: Any) -> list[Turn]:
        """The jobs of one place, in their order."""
        from benchmarks.probes import PROBES

        if not self.together:
            every = alternating(list(groups.items()), getattr(settings, "rounds", 1))
            steps = getattr(settings, "steps", 1)
            return [Turn(name, rows, self.columns, steps, number) for number, (name, rows) in every]
        (rows,) = groups.values()
        if not self.apart or settings.quick:
            return [Turn("", rows, self.columns, settings.rounds)]
        examined = [name for name in self.columns if isinstance(name, str) and PROBES[name].examines]
        engines = dict.fromkeys(row.case.engine for row in rows)
        own = {name: [row for row in rows if row.case.engine == name] for name in engines}
        others = [name for name in self.columns if name not in examined]
        return [
            *(Turn(name, rows, examined, 0) for name, rows in own.items()),
            Turn("", rows, others, settings.rounds),
        ]

    def jobs(self, rows: Sequence[Row]) -> dict[Any, dict[str, list[Row]]]:
        """The rows of each job: by number of ranks, controller and what it runs within, and where jobs alternate by engine."""
        jobs: dict[Any, dict[str, list[Row]]] = {}
        for row in rows:
            case = row.case
            place = jobs.setdefault((case.np, case.controller, *self.within(case)), {})
            place.setdefault("" if self.together else case.engine, []).append(row)
        return jobs

    def report(
        self, run: BenchRun, settings: Any, rows: Sequence[Row], left_out: Mapping[str, str] | None = None
    ) -> Report:
        """The report of all rows so far."""
        from benchmarks.probes import PROBES, probes_of
        from hvd_ckpt.processes.runtime import threads_per_rank

        def compared(title: str, base: Compared) -> Column:
            def of(row: Row) -> Any:
                if callable(base):
                    return base(row, rows)
                return None if row.case.engine == base else row.ratio(row.peer(rows, base))

            return Column(title, of, _two_digits, key=title.replace(" ", "_"), missing="")

        def varies(name: str, of: Callable[[Case], Any]) -> Column:
            return Column(
                name, lambda row: of(row.case), key=name, left=not isinstance(of(rows[0].case), int)
            )

        conditions = [
            varies("workload", lambda case: case.workload),
            varies("np", lambda case: case.np),
            varies("controller", lambda case: case.controller),
            *(varies(name, lambda case, name=name: self.axes[name].word(case.at[name])) for name in self.axes),  # type: ignore[misc]
        ]  # fmt: skip
        # What is the same everywhere is in the facts: the settings.
        shown = [column for column in conditions if len({str(column.of(row)) for row in rows}) > 1]
        step = Column(
            "step ms", lambda row: row.step, quartiles_in_ms(".1f"), key="step_seconds", missing="failed"
        )
        columns = [
            *(column if column in shown else dataclasses.replace(column, title="") for column in conditions),
            Column("engine", lambda row: row.case.engine.rpartition(":")[2], left=True),
            Column("", lambda row: row.case.engine, key="engine"),
            Column("", lambda row: row.seconds, key="rounds"),
            *([step] if self.timed else []),
            *(compared(title, base) for title, base in self.against.items() if callable(base) or base in settings.engines),
            *(PROBES[column].columns[column] if isinstance(column, str) else column for column in self.columns),
            Column("", lambda row: row.figures, key="figures"),
            Column("", lambda row: row.failure, key="failure"),
        ]  # fmt: skip
        facts: dict[str, Any] = {
            name: self.workloads[name] for name in settings.workloads if self.workloads[name]
        }
        notes = list(self.notes)
        if self.launched:
            threads = {size: self.threads or threads_per_rank(size) for size in sorted(settings.np)}
            facts["threads per rank"] = ", ".join(f"{count} at np={size}" for size, count in threads.items())
            facts["device"] = device_name(settings.device)
            notes = [*((TOGETHER if self.together else NOTES) if self.timed else ()), *notes]
            notes += [probe.notes for probe in probes_of(self.columns)]
        else:
            facts |= {f"sizes of {row.case.workload}": row.case.sizes for row in rows}
        table = table_of(columns, rows, folded=len(shown))
        report = run.report(self.title, [table], results_of(columns, rows), facts, notes=notes)
        report.remarks = [f"{engine} is left out: {why}" for engine, why in (left_out or {}).items()]
        report.remarks += [f"{name}: {why}" for name, why in run.failures.items()]
        for row in rows:
            if row.failure and row.failure not in run.failures.values():
                where = ", ".join(f"{name} {value}" for name, value in row.case.condition.items())
                report.remarks.append(f"{row.case.engine}, {where}: {row.failure}")
        peak = "step_bytes" if "step_peak" in self.columns else "peak_bytes"
        report.draw = lambda folder: (
            draw(folder, rows, shown, peak) if self.draw is None else self.draw(folder, rows)
        )
        return report


def _sizes(text: str | None) -> dict[str, Any] | None:
    """Reads sizes, separated by commas; without any there are none."""
    pairs = [entry.partition("=") for entry in (text or "").split(",") if entry]
    if wrong := [name for name, _, value in pairs if not value]:
        raise ValueError(f"'{wrong[0]}' has no value: give such as batch=16")
    return {name: yaml.safe_load(value) for name, _, value in pairs} or None


def _two_digits(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def draw(folder: Path, rows: Sequence[Row], conditions: Sequence[Column], figure: str) -> list[str]:
    """The picture of any suite: the time of each row's step with its quartiles, and its peak where that is measured."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.step is not None]
    if not timed:
        return []
    labels = [" ".join([*(column.entry(row) for column in conditions), row.case.engine]) for row in timed]
    engines = list(dict.fromkeys(row.case.engine for row in timed))
    colors = [f"C{engines.index(row.case.engine) % 10}" for row in timed]
    # Of each panel the value of each row, maybe with its quartiles.
    panels = {"ms": [[1000 * value for value in dataclasses.astuple(row.step)] for row in timed if row.step]}
    peaks = [row.over(figure) for row in timed]
    if all(peaks):
        panels["peak MiB"] = [[peak / MIB] for peak in peaks]
    picture = Figure(figsize=(6 * len(panels), 1.2 + 0.25 * len(timed)), layout="constrained")
    for axes, (title, values) in zip(
        picture.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items()
    ):
        spread = [[abs(value[0] - value[each]) for value in values] for each in (1, -1) if len(values[0]) > 1]
        axes.barh(range(len(labels)), [value[0] for value in values], xerr=spread or None, color=colors)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlabel(title)
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    return [save_figure(picture, folder / "picture.png")]
