"""A suite as data: its command, its jobs in alternating order and its table follow from it."""

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
from typing import Annotated, Any

import click
from pydantic import BeforeValidator, Field, create_model

from benchmarks.case import Case, MeasuredJob, Row
from benchmarks.pictures import Lines
from benchmarks.quartiles import Quartiles
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner import jobs
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Column, Report, table_of
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
from hvd_ckpt.utils.plain_data import parsed

Compared = str | Callable[[Row, Sequence[Row]], Any]
"""An engine, to which the time of a step is a ratio, or from a row and all rows to a value: quartiles, a number or a text."""
Place = tuple[Sequence[str], Sequence[str]]

STEP = "step ms: median over rounds, quartiles in brackets; a step ends when the slowest rank's does. "
ALONE = "Jobs alternate: A B C, then C B A."
TOGETHER = "All engines are in the same processes and take turns step by step: A B C, then C B A."
RATIO = (
    "of NAME: the time of a step as a ratio to that engine's in the same round; median over rounds, quartiles in brackets. Below 1 "
    "is faster."
)


@dataclass(frozen=True)
class Axis:
    """An option of a suite with several values, each of which makes cases.

    Attributes:
        help: of the option.
        values: all words that it takes.
        default: some of them, by default all.
    """

    help: str
    values: Sequence[str]
    default: str = ""


@dataclass(frozen=True)
class Suite:
    """Cases, what is measured of them, and how they are shown.

    Attributes:
        engines: by name.
        workloads: by name.
        columns: names in :data:`benchmarks.probes.PROBES`, or columns of figures that the suite's own worker finds.
        against: further columns by title.
        axes: further options by name.
        keeps: which cases there are; by default every engine with every workload and every value of the axes.
        options: of the engine in a case that has none so far, and those of the worker.
        sizes, quick_sizes: of each workload; ``--set`` changes them.
        np, controllers, rounds, steps, warm_up: defaults; ``quick`` has other ones by name.
        optimizer, lr: of ``torch.optim``.
        cosine: the learning rate warms up and falls to 0 over the timed steps.
        together: all engines of a condition are in one job, and a round is one step.
        threads: of each rank; by default this machine's processors are shared.
        notes: lines below the table, beside those of columns.
        average: of the steps of a job.
        sound: whether a row is as it must be; the exit status is 1 if one is not, or has failed.
        within: of a case, the words of a command that runs the launcher, and options of the launcher.
        measure: ``module:function`` that the ranks call instead of :class:`benchmarks.worker.Bench`, and what is called here unless
            it is ``launched``. It takes the job and a case, or where cases are ``together`` the job. Its engines and workloads are
            words of its own.
        lines: a picture, if there is one.
    """

    engines: Sequence[str]
    workloads: Sequence[str]
    columns: Sequence[str | Column] = ()
    against: Mapping[str, Compared] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    keeps: Callable[[Case], bool] = lambda case: True
    options: Callable[[Case], Mapping[str, Any]] = lambda case: {}
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
    threads: int | None = None
    notes: Sequence[str] = ()
    average: Callable[[list[float]], float] = statistics.median
    sound: Callable[[Row, Sequence[Row]], bool] = lambda row, rows: True
    within: Callable[[Case], Place] = lambda case: ((), ())
    measure: str = ""
    launched: bool = True
    lines: Lines | None = None

    def command(self, name: str, help: str) -> click.Command:
        """``python -m benchmarks NAME``; the first line of its help is the title of the report."""

        run = functools.partial(self.run, title=help.partition("\n")[0].rstrip("."))
        return bench_command(name, help, self.settings(), run)

    def settings(self) -> type[BenchSettings]:
        """What the command line says: the options of all suites, and the axes of this one."""

        fields: dict[str, Any] = {}

        def option(name: str, kind: Any, help: str, default: Any) -> None:
            extra = {"quick": self.quick[name]} if name in self.quick else None
            fields[name] = (kind, Field(default, description=help, json_schema_extra=extra))

        def names(name: str, help: str, known: Sequence[str], default: str = "", find: str = "") -> None:
            kind = Annotated[tuple[str, ...], names_of(None if find else known, find)]
            option(name, kind, help, default or ",".join(known))

        option("np", Annotated[tuple[int, ...], numbers_of("ranks")], "Numbers of ranks.", self.np)
        if self.launched:
            option("controller", Controllers, "What starts the ranks.", self.controllers)
        else:
            names("controller", "What starts the ranks.", CONTROLLERS, self.controllers)
        names("workloads", "What is trained.", self.workloads)
        if not self.measure:
            find = "benchmarks.engines:find_engine"
            names("engines", "Engines, or module:Class of your own.", self.engines, find=find)
        else:
            names("engines", "Engines.", self.engines)
        for name, axis in self.axes.items():
            names(name, axis.help, axis.values, axis.default)
        if self.rounds > 1:
            help = "Steps in turn." if self.together else "Jobs per engine, alternating."
            option("rounds", Count, help, self.rounds)
        if self.launched:
            if not self.together:
                option("steps", Count, "Timed steps per job.", self.steps)
            option("device", Device, OF_DEVICE, "cpu")
            option("timeout", Seconds, "Seconds without a step that count as a hang.", 600.0)
        sizes = Annotated[dict[str, Any] | None, BeforeValidator(_sizes)]
        option(
            "set", sizes, "Sizes of the workloads in place of the suite's, such as batch=16,layers=4.", None
        )
        option(
            "quick", bool, "Few ranks, few rounds, small models: whether it works, not how fast it is.", False
        )
        return create_model("Settings", __base__=BenchSettings, **fields)

    def cases(self, settings: Any) -> Iterator[Case]:
        """The cases of these settings, with the options and the sizes of this suite."""
        self._check_sizes(settings)
        axes = [getattr(settings, name) for name in self.axes]
        places = itertools.product(settings.np, settings.controller, settings.workloads, *axes)
        for (size, controller, name, *words), engine in itertools.product(places, settings.engines):
            sizes = ((settings.quick and self.quick_sizes) or self.sizes).get(name, {}) | (settings.set or {})
            case = Case(name, engine, size, controller, dict(zip(self.axes, words)), sizes=sizes)
            if self.keeps(case):
                yield dataclasses.replace(case, options=dict(self.options(case)))

    def _check_sizes(self, settings: Any) -> None:
        from benchmarks.workloads import WORKLOADS

        for name, (option, value) in itertools.product(settings.workloads, (settings.set or {}).items()):
            known = WORKLOADS[name].sizes if not self.measure else self.sizes.get(name, {})
            if option not in known:
                raise BadArgument(f"--set {option}: the sizes of {name} are {', '.join(known)}")
            kind = type(known[option])
            fits = type(value) is kind or (kind, type(value)) == (float, int)
            least = int(kind is int and known[option] > 0)  # a number of something; others may be 0
            if not fits or not (kind is str or value >= least):
                raise BadArgument(f"--set {option}={value}: give such as {option}={known[option]}")

    def run(self, run: BenchRun, settings: Any, title: str) -> None:
        """Runs all jobs, saves the report before each, prints it."""
        from benchmarks.engines import find_engine

        check_devices(getattr(settings, "device", "cpu"), max(settings.np))
        remarks: list[str] = []
        if not self.measure:
            reasons = {engine: find_engine(engine).unavailable() for engine in settings.engines}
            remarks += [f"{engine} is left out: {why}" for engine, why in reasons.items() if why]
            here = tuple(engine for engine, why in reasons.items() if not why)
            settings = settings.model_copy(update={"engines": here})
        rows = [Row(case) for case in self.cases(settings)]
        if not rows:
            raise BadArgument("; ".join(["there is nothing to measure with these options", *remarks]))
        report = functools.partial(self.report, run, settings, title, rows, remarks)
        turns = list(self.turns(rows, getattr(settings, "rounds", 1)))
        with run.progress(len(turns)) as show:
            for number, name, rows_of_job in turns:
                show(f"{name}, round {number + 1}", 0)
                # Before a job, not after it: a run that is ended leaves what it has found.
                run.save(report())
                if group := [row for row in rows_of_job if not row.failure]:
                    remarks += self.job(run, settings, number, name, group)
                show(name, 1)
        run.finish(report())

    def turns(self, rows: Sequence[Row], rounds: int) -> Iterator[tuple[int, str, list[Row]]]:
        """The jobs in their order: number of the round, name and rows. Those of a number of ranks alternate by engine."""
        places: dict[Any, dict[str, list[Row]]] = {}
        for row in rows:
            within, _ = self.within(row.case)
            place = places.setdefault((row.case.np, row.case.controller, *within), {})
            place.setdefault("" if self.together else row.case.engine, []).append(row)
        for groups in places.values():
            for number, (engine, group) in alternating([*groups.items()], 1 if self.together else rounds):
                case = group[0].case
                words = [engine, f"{case.np} ranks over {case.controller}"]
                words += [f"{name} {word}" for name, word in case.at.items()] if self.within(case)[0] else []
                yield number, ", ".join(filter(None, words)), group

    def job(self, run: BenchRun, settings: Any, number: int, name: str, rows: Sequence[Row]) -> Iterator[str]:
        """Runs a job, and adds what it finds to its rows; says what has failed."""
        from hvd_ckpt.processes.runtime import threads_per_rank

        case = rows[0].case
        job = MeasuredJob(
            folder=run.jobs / re.sub("[ :/]", "-", f"{name}-{number + 1}"),
            size=case.np,
            suite=run.name,
            cases=tuple(row.case for row in rows),
            steps=getattr(settings, "rounds" if self.together else "steps", 1),
            seed=number,
            device=getattr(settings, "device", "cpu"),
        )
        within, options = self.within(case)
        try:
            if not self.launched:
                ranks = [import_named("function", job.worker)(job)]
            else:
                ranks = jobs.run_job(
                    job,
                    list[dict[str, Any]],
                    case.controller,
                    settings.timeout,
                    threads=self.threads or threads_per_rank(case.np),
                    environment={"PYTHONPATH": os.pathsep.join(sys.path)},
                    within=within,
                    options=options,
                )
        except (jobs.JobError, RuntimeError, ValueError, ArithmeticError) as error:
            why = str(error) if isinstance(error, jobs.JobError) else jobs.reason(error)
            for row in rows:
                row.failure = why
            yield f"{name}: {why}"
            return
        for row, found in zip(rows, zip(*ranks)):
            row.add(found, None if self.together else self.average)
            if row.failure:
                where = ", ".join(f"{name} {value}" for name, value in row.case.condition.items())
                yield f"{row.case.engine}, {where}: {row.failure}"

    def report(
        self, run: BenchRun, settings: Any, title: str, rows: Sequence[Row], remarks: list[str]
    ) -> Report:
        """The report of all rows so far."""
        import torch

        from benchmarks.probes import NOTES, PROBES
        from hvd_ckpt.processes.runtime import threads_per_rank

        def compared(title: str, base: Compared) -> Column:
            def of(row: Row) -> Any:
                if callable(base):
                    return base(row, rows)
                return None if row.case.engine == base else row.ratio(row.peer(rows, base))

            return Column(title, of, _two_digits, key=title.replace(" ", "_"), missing="")

        def condition(name: str) -> Column:
            # What is the same everywhere is in the facts: the settings.
            varies = len({row.case.condition[name] for row in rows}) > 1
            return Column(name if varies else "", lambda row: row.case.condition[name], key=name)

        conditions = [condition(name) for name in ("workload", "np", "controller", *self.axes)]
        timed = any(row.seconds for row in rows)
        step = [
            Column("", lambda row: row.step, key="step_seconds"),
            Column("step ms", lambda row: row.step or row.failure, _in_ms, missing="not measured"),
        ]
        against = {
            title: base for title, base in self.against.items() if callable(base) or base in settings.engines
        }
        columns = [
            *conditions,
            Column("engine", lambda row: row.case.engine.rpartition(":")[2]),
            Column("", lambda row: row.case.engine, key="engine"),
            Column("", lambda row: row.seconds, key="rounds"),
            *(step if timed else []),
            *(compared(title, base) for title, base in against.items()),
            *(PROBES[column] if isinstance(column, str) else column for column in self.columns),
            Column("", lambda row: row.figures, key="figures"),
            Column("", lambda row: row.failure, key="failure"),
        ]
        facts: dict[str, Any] = {}
        notes = list(self.notes)
        if self.launched:
            threads = {size: self.threads or threads_per_rank(size) for size in sorted(settings.np)}
            facts["threads per rank"] = ", ".join(f"{count} at np={size}" for size, count in threads.items())
            cuda = settings.device == "cuda"
            facts["device"] = torch.cuda.get_device_name() if cuda else "CPU"
            notes = [*([STEP + (TOGETHER if self.together else ALONE), RATIO] if timed else ()), *notes]
            notes += dict.fromkeys(NOTES[column] for column in self.columns if column in NOTES)
        else:
            facts |= {f"sizes of {row.case.workload}": row.case.sizes or None for row in rows}
        return run.report(
            title,
            [table_of(columns, rows, folded=sum(bool(column.title) for column in conditions))],
            [{column.key: column.of(row) for column in columns if column.key} for row in rows],
            facts,
            notes=notes,
            remarks=remarks,
            success=all(not row.failure and self.sound(row, rows) for row in rows),
            draw=functools.partial(self.lines.draw, rows=rows) if self.lines else None,
        )


def _sizes(text: str | None) -> dict[str, Any] | None:
    """Reads sizes, separated by commas; without any there are none."""
    pairs = [entry.partition("=") for entry in (text or "").split(",") if entry]
    if wrong := [name for name, _, value in pairs if not value]:
        raise ValueError(f"'{wrong[0]}' has no value: give such as batch=16")
    return {name: parsed(value) for name, _, value in pairs} or None


def _in_ms(found: Quartiles | str) -> str:
    """The time of a step; ``found`` may say why there is none."""
    return "failed" if isinstance(found, str) else f"{found.times(1000):.1f}"


def _two_digits(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"
