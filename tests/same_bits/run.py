"""``python -m benchmarks replicas``: the same training runs on several numbers of ranks and over both controllers, and hashes.

``job`` has the runs of one number of ranks, ``curves`` the losses of a GPT beside those of stock Horovod.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from same_bits.curves import CurveJob
from same_bits.job import WORKLOADS, Job, RankResult

from benchmarks.checks import TESTS
from benchmarks.suites.replicas import ReplicaSettings
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.runner.report import Report, Table, save_figure
from hvd_ckpt.app.compare.runner.settings import CONTROLLERS
from hvd_ckpt.processes.probe import probe

# Ranks find the modules of this folder.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split()])}
QUICK = ("gpt, reentrant segments, fp16 that overflows", "densenet, SGD, segments, short last batch")
NOTES = (
    "A hash is of the weights, the buffers, the optimizer's state, the loss scale, and all logged losses and evaluations of a run.",
    "resumed: a run that continues from the middle of the run in the column before, which had another number of ranks or another "
    "controller.",
    "The runs are those of `hvd-ckpt train --replicas`, with tiny models and one CPU thread on each rank.",
)


@dataclass
class Hashes:
    """The results so far.

    Attributes:
        names: of the workloads.
        runs: for each column of the table, its title and the hash of each workload.
        skipped: for each workload, the numbers of steps that a loss scale skipped.
        losses: of each step of the further runs, by the kind of run and the number of ranks.
    """

    names: Sequence[str]
    runs: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    skipped: dict[str, set[int]] = field(default_factory=dict)
    losses: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, title: str, result: RankResult) -> None:
        """Adds the result of a job."""
        self.runs += [(title, result.whole), *([("resumed", result.resumed)] if result.resumed else [])]
        for name, count in result.overflows.items():
            self.skipped.setdefault(name, set()).add(count)

    def several(self) -> list[str]:
        """The workloads with several hashes, or losses that depend on the number of ranks."""
        several = [name for name in self.names if len({run[name] for _, run in self.runs}) > 1]
        if self.losses:
            ours = list(self.losses.values())[-1]
            several += (
                ["losses in the picture"] if any(run != ours[min(ours)] for run in ours.values()) else []
            )
        return several


def run_replicas(run: BenchRun, settings: ReplicaSettings) -> None:
    """Runs the jobs in turn, and ends the command.

    Raises:
        BadArgument: there is no workload of a number.
    """
    names = tuple(WORKLOADS)
    if settings.workloads is not None:
        if max(settings.workloads) > len(names):
            given = ",".join(map(str, settings.workloads))
            raise BadArgument(f"--workloads {given}: there are {len(names)}, give their numbers")
        names = tuple(names[number - 1] for number in settings.workloads)
    elif settings.quick:
        names = QUICK
    so_far = Hashes(names)
    run.make_report = lambda: make_report(run, settings, so_far)
    places = _places(settings)
    earlier = None
    with run.progress(len(places) + (2 * len(settings.sizes) if settings.curves else 0)) as progress:
        for size, controller in places:
            title = f"np={size} {controller}"
            job = Job(
                run.jobs / f"np{size}-{controller}", size, settings.replicas, names, settings.steps, earlier
            )
            ranks = progress.job(
                f"{title}: {len(names)} workloads",
                job,
                RankResult,
                name=title,
                controller=controller,
                threads=1,
                environment=ENVIRONMENT,
            )
            if ranks and any(rank != ranks[0] for rank in ranks):
                run.failures[title] = "the ranks end in different bits"
            elif ranks:
                so_far.add(title, ranks[0])
                earlier = job.folder
        kinds = (
            {"stock Horovod": True, f"{settings.replicas} logical replicas": False} if settings.curves else {}
        )
        so_far.losses = {kind: {} for kind in kinds}
        for (kind, stock), size in itertools.product(kinds.items(), settings.sizes):
            folder = run.jobs / f"curve-{'stock' if stock else 'replicas'}-np{size}"
            losses = progress.job(
                f"np={size} {places[0][1]}, losses of {kind}",
                CurveJob(folder, size, settings.replicas, stock, settings.curves),
                list[float],
                controller=places[0][1],
                threads=1,
                environment=ENVIRONMENT,
            )
            if losses:
                so_far.losses[kind][size] = losses[0]
    report = make_report(run, settings, so_far)
    report.success = not run.failures and not so_far.several()
    report.conclusion = (
        "Every workload ends in the same bits everywhere." if report.success else "Not all bits are the same."
    )
    run.finish(report, report.success)


def _places(settings: ReplicaSettings) -> list[tuple[int, str]]:
    """Numbers of ranks and controllers, in an order in which neighbours differ most; one rank is the same over every controller."""
    controllers = settings.controllers or [name for name in CONTROLLERS if probe(name).works]
    # Each job resumes the runs of the one before it: the more they differ, the more a resumption shows.
    first, *others = controllers
    largest = max(settings.sizes)
    sizes = [largest, *(size for size in settings.sizes if size != largest)]
    more = [(size, name) for name in others for size in reversed(settings.sizes) if size > 1]
    return [(size, first) for size in sizes] + more


def make_report(run: BenchRun, settings: ReplicaSettings, so_far: Hashes) -> Report:
    """The report of all jobs so far."""
    several = so_far.several()
    rows, results = [], []
    for name in so_far.names:
        hashes = [hashes[name] for _, hashes in so_far.runs]
        rows.append((name, *hashes, "NO" if name in several else "yes"))
        skipped = sorted(so_far.skipped.get(name, ()))
        results.append(
            {"workload": name, "hashes": hashes, "one": name not in several, "skipped_steps": skipped}
        )
    table = Table(("workload", *(title for title, _ in so_far.runs), "one hash"), rows, left=("workload",))
    title = "Logical replicas: one hash on any number of ranks"
    report = run.report(title, [table], results, {"threads per rank": 1}, notes=NOTES)
    report.remarks += [f"{name}: several hashes" for name in several]
    if settings.curves:
        report.data = {"losses": so_far.losses}
        # Until all kinds of runs have begun there is nothing to draw.
        begun = so_far.losses and all(so_far.losses.values())
        report.draw = (lambda folder: draw(so_far.losses, folder)) if begun else None
    return report


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
