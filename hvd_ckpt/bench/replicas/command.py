"""``hvd-ckpt bench replicas``: the same training runs on several numbers of ranks and over both controllers, and their hashes.

Exit status 0 if every workload has one hash everywhere, 1 if one has several or a job failed, 2 for a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError, run_job
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    check_replicas,
    count_option,
    quick_option,
    timeout_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts, save_figure

if TYPE_CHECKING:
    from hvd_ckpt.bench.replicas.job import RankResult

STEPS, QUICK_STEPS = 6, 4
CURVES = 60
QUICK = ("gpt, reentrant segments, fp16 that overflows", "densenet, SGD, segments, short last batch")
NOTES = (
    "A hash is of the weights, the buffers, the optimizer's state, the loss scale, and all logged losses and evaluations of a run.",
    "resumed: a run that continues from the middle of the run in the column before, which had another number of ranks or another "
    "controller.",
    "The runs are those of `hvd-ckpt train --replicas`, with tiny models and one CPU thread on each rank.",
)


@dataclass
class Column:
    """The results of one job: ``ranks`` over ``controller``."""

    controller: str
    ranks: int
    result: RankResult | None = None
    failure: str | None = None

    @property
    def title(self) -> str:
        return f"np={self.ranks} {self.controller}"


@bench_command("replicas", width=170)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Logical replicas of each run, a power of two.",
)
@click.option(
    "--np",
    "sizes",
    default="1,2,4",
    show_default=True,
    help="Numbers of ranks; powers of two up to --replicas.",
)
@click.option("--controllers", help="Controllers that start the ranks.  [default: those of this Horovod]")
@click.option("--workloads", help="Numbers of the workloads to train, from 1, such as 1,3.  [default: all]")
@count_option("--steps", help="Steps of each run.", default=STEPS, quick=QUICK_STEPS)
@click.option(
    "--curves",
    type=click.IntRange(0),
    help="Steps of further runs, of one GPT, whose losses are drawn beside those of stock Horovod; 0 for none.  "
    f"[default: {CURVES}; with --quick 0]",
)
@quick_option("Two of the workloads.")
@timeout_option(900)
def replicas(
    run: BenchRun,
    replicas: int,
    sizes: str,
    controllers: str | None,
    workloads: str | None,
    steps: int,
    curves: int | None,
    quick: bool,
    timeout: float,
) -> None:
    """Train as logical replicas on several numbers of ranks, and compare what comes of it bit for bit.

    Each workload is trained to the end on every number of ranks, and once more from the middle of the run of another number. The
    table has one hash of all results of each run. A picture has the losses of a GPT on each number of ranks, relative to the
    smallest, with stock Horovod and as logical replicas.
    """
    from hvd_ckpt.bench.replicas.job import WORKLOADS, Job, RankResult

    counts = whole_numbers("--np", sizes, "ranks")
    check_replicas(replicas, counts)
    names = QUICK if quick else tuple(WORKLOADS)
    if workloads is not None:
        numbers = whole_numbers("--workloads", workloads, "a workload")
        if max(numbers) > len(WORKLOADS):
            raise BadArgument(f"--workloads {workloads}: there are {len(WORKLOADS)}, give their numbers")
        names = tuple(list(WORKLOADS)[number - 1] for number in numbers)
    settings = {"replicas": replicas, "steps": steps, "np": list(counts)}
    columns = columns_of(counts, _controllers(controllers))
    before = None
    points = curves if curves is not None else 0 if quick else CURVES
    drawn = None
    with run.progress(len(columns) + (2 * len(counts) if points else 0)) as progress:
        for column in columns:
            progress.start(f"{column.title}: {len(names)} workloads")
            folder = run.jobs / column.title.replace(" ", "-").replace("=", "")
            job = Job(folder, column.ranks, replicas, names, steps, before)
            try:
                results = run_job(job, RankResult, column.controller, timeout, threads=1)
                if any(one != results[0] for one in results):
                    raise JobError("the ranks end in different bits")
                column.result, before = results[0], folder
            except JobError as error:
                column.failure = str(error)
            run.save(make_report(columns, names, settings))
        if points:
            drawn = train_curves(run, progress, replicas, counts, columns[0].controller, points, timeout)
    report = make_report(columns, names, settings, drawn)
    run.finish(report, success=report.success)


@dataclass
class Curves:
    """The losses of each step, by the kind of run and the number of ranks; ``failures``: of jobs that failed, why."""

    losses: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def one(self) -> bool:
        """Whether the losses of logical replicas are the same on every number of ranks."""
        *_, ours = self.losses.values()
        return not self.failures and all(values == ours[min(ours)] for values in ours.values())


def train_curves(
    run: BenchRun,
    progress: Any,
    replicas: int,
    counts: Sequence[int],
    controller: str,
    steps: int,
    timeout: float,
) -> Curves:
    """Trains a GPT on each number of ranks, with stock Horovod and as logical replicas."""
    from hvd_ckpt.bench.replicas.curves import Job

    curves = Curves()
    for stock, kind in ((True, "stock Horovod"), (False, f"{replicas} logical replicas")):
        curves.losses[kind] = {}
        for count in counts:
            progress.start(f"np={count} {controller}: losses of {kind}")
            folder = run.jobs / f"curve-{'stock' if stock else 'replicas'}-np{count}"
            try:
                job = Job(folder, count, replicas, stock, steps)
                curves.losses[kind][count] = run_job(job, list[float], controller, timeout, threads=1)[0]
            except JobError as error:
                curves.failures.append(f"np={count} {controller}, losses of {kind}: {error}")
    return curves


def _controllers(given: str | None) -> list[str]:
    if given is not None:
        names = split_names("--controllers", given, ("gloo", "mpi"))
        return [check_controller(name) for name in names]
    from hvd_ckpt.processes.probe import probe

    return [name for name in ("gloo", "mpi") if probe(name).works]


def columns_of(counts: Sequence[int], controllers: Sequence[str]) -> list[Column]:
    """The jobs in an order in which neighbours differ as much as may be; one rank is the same over every controller."""
    first, *others = controllers
    columns = [
        Column(first, count) for count in (max(counts), *(one for one in counts if one != max(counts)))
    ]
    return columns + [Column(one, count) for one in others for count in reversed(counts) if count > 1]


def make_report(
    columns: Sequence[Column],
    names: Sequence[str],
    settings: dict[str, Any],
    curves: Curves | None = None,
) -> Report:
    """The report of all jobs so far."""
    done = [(column.title, column.result) for column in columns if column.result is not None]
    hashes: list[tuple[str, dict[str, str]]] = []
    for title, result in done:
        hashes += [(title, result.whole), *([("resumed", result.resumed)] if result.resumed else [])]
    rows, results, several = [], [], []
    for name in names:
        found = [of_run[name] for _, of_run in hashes]
        one = len(set(found)) == 1
        several += [] if one else [name]
        rows.append((name, *found, "yes" if one else "NO"))
        skipped = sorted({result.overflows[name] for _, result in done})
        results.append({"workload": name, "hashes": found, "one": one, "skipped_steps": skipped})
    failures = [f"{column.title}: {column.failure}" for column in columns if column.failure is not None]
    if curves is not None:
        failures += curves.failures
        several += [] if curves.one else ["losses in the picture"]
    success = len(done) == len(columns) and not several
    return Report(
        "Logical replicas: one hash on any number of ranks",
        machine_facts(1, settings),
        [Table(("workload", *(title for title, _ in hashes), "one hash"), rows, left=("workload",))],
        results,
        remarks=failures + [f"{name}: several hashes" for name in several],
        notes=NOTES,
        settings=settings,
        conclusion="Every workload ends in the same bits everywhere."
        if success
        else "Not all bits are the same.",
        success=success,
        data={"losses": curves.losses} if curves else {},
        draw=(lambda folder: draw(curves.losses, folder)) if curves and not curves.failures else None,
    )


def draw(losses: dict[str, dict[int, list[float]]], folder: Path) -> list[str]:
    """A picture with a panel for each kind of run: how far the losses are from those on the smallest number of ranks.

    Args:
        losses: by the name of the kind and the number of ranks.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6))
    for axes, (title, runs) in zip(figure.subplots(1, len(losses), sharey=True), losses.items()):
        for number, (ranks, values) in enumerate(sorted(runs.items())):
            apart = [value - first for value, first in zip(values, runs[min(runs)])]
            # Lines get thinner, so that several of the same values can be told from one.
            width = 1.5 * (len(runs) - number)
            label = f"{ranks} ranks" if ranks > 1 else "1 rank"
            axes.plot(range(1, len(values) + 1), apart, label=label, linewidth=width)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    figure.axes[0].set_ylabel(
        f"training loss, relative to\n{min(min(runs) for runs in losses.values() if runs)} rank(s)"
    )
    return [save_figure(figure, folder / "losses.png")]
