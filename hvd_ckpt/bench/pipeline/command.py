"""``hvd-ckpt bench pipeline``: the contenders' jobs in turn, the table of their steps, and the timeline of one of ours.

Exit status 0 if every contender was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.cli.command_line import check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError, run_job
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    count_option,
    quick_option,
    timeout_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts, mebibytes, save_figure, shown
from hvd_ckpt.bench.harness.stats import Quartiles, alternating, quartiles_of_ratios, slowest

if TYPE_CHECKING:
    from hvd_ckpt.bench.pipeline.job import RankResult, Span

TORCH, UNSTAGED = "torch, Gloo", "unstaged"
CONTENDERS = {  # by the name of the option: the title, the ranks' program, the controller
    "mpi": ("hvd_ckpt, MPI", "hvd_ckpt", "mpi"),
    "gloo": ("hvd_ckpt, Gloo", "hvd_ckpt", "gloo"),
    "torch": (TORCH, "torch", "gloo"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
WORKLOADS = ("gpt", "resnet")
PAIRS, QUICK_PAIRS = 5, 1
STEPS, QUICK_STEPS = 5, 1
COLUMNS = (
    "workload", "np", "schedule", "engine", "step ms", "of torch", "of ideal",
    "peak MiB", "of unstaged", "recomputing", "sent MiB",
)  # fmt: skip
NOTES = (
    "Every rank has one thread, every stage one replica; all engines have the same cuts, schedule, micro-batches and optimizer, "
    "and keep all activations. Unstaged: one rank with the whole model, which runs the same micro-batches one after the other.",
    "step ms: median over jobs of a job's median step; a step ends when the slowest rank's does. of torch: that time as a ratio to "
    "torch.distributed.pipelining's in the same round of jobs (jobs alternate: A B C, then C B A); median over rounds, "
    "quartiles in brackets. Below 1 is faster.",
    "of ideal: how many times faster than the unstaged rank, as a part of p m v / (m v + p - 1) for p ranks, m micro-batches and v "
    "chunks of the model on each rank (2 with the interleaved schedule, else 1), within a round. 1 means that ranks wait no longer "
    "than the schedule makes them.",
    "peak MiB: exact bytes that the stage with most holds at the peak of a step: parameters, buffers, optimizer state, gradients "
    "and activations. of unstaged: as a ratio to the unstaged rank's; recomputing: the same with checkpoint=\"always\". "
    "sent MiB: bytes that all ranks send in a step.",
    "Timeline: a step with checkpoint=\"always\".",
)  # fmt: skip
COLORS = {"forward": "#66a182", "backward": "#1b6ca8", "recompute": "#edae49", "wait": "#e4e4e4"}


@dataclass
class Case:
    """A workload in a schedule on a number of ranks, with the results of each contender's jobs.

    Attributes:
        seconds: step time of the job in each round, by contender.
        peak_bytes, recomputed_peak_bytes, sent_bytes: by contender.
        timelines: of each rank, by contender.
    """

    workload: str
    size: int
    schedule: str
    chunks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    recomputed_peak_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    timelines: dict[str, list[list[Span]]] = field(default_factory=dict)

    def add(self, contender: str, ranks: Sequence[RankResult]) -> None:
        """Adds the results of one job."""
        figures = [rank.figures[self.workload][self.schedule] for rank in ranks]
        times = slowest(one.seconds for one in figures)
        self.seconds.setdefault(contender, []).append(statistics.median(times))
        peaks = [one.peak_bytes for one in figures if one.peak_bytes is not None]
        recomputed = [one.recomputed_peak_bytes for one in figures if one.recomputed_peak_bytes is not None]
        if peaks:
            self.peak_bytes[contender] = max(peaks)
            self.sent_bytes[contender] = sum(one.sent_bytes or 0 for one in figures)
        if recomputed:
            self.recomputed_peak_bytes[contender] = max(recomputed)
            self.timelines[contender] = [one.timeline for one in figures]

    def of_ideal(self, contender: str, unstaged: Sequence[float]) -> Quartiles | None:
        """The speed-up over the unstaged rank as a part of the schedule's."""
        from hvd_ckpt.bench.pipeline.job import VIRTUAL

        if self.schedule not in VIRTUAL:
            return None
        passes = self.chunks * VIRTUAL[self.schedule]
        ideal = self.size * passes / (passes + self.size - 1)
        return quartiles_of_ratios([one / ideal for one in unstaged], self.seconds.get(contender, []))


@bench_command("pipeline", width=150)
@click.option("--np", "sizes", help="Numbers of ranks, one for each stage.  [default: 2,4; with --quick 2]")
@click.option(
    "--engines", default="mpi,gloo,torch", show_default=True, help="Ours over MPI, over Gloo; torch."
)
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, help="Workloads to train.")
@click.option("--schedules", default=",".join(SCHEDULES), show_default=True, help="Schedules.")
@click.option(
    "--chunks", type=click.IntRange(1), default=8, show_default=True, help="Micro-batches of a step."
)
@count_option("--rounds", help="Jobs per engine, alternating.", default=PAIRS, quick=QUICK_PAIRS)
@count_option("--steps", help="Timed steps per job.", default=STEPS, quick=QUICK_STEPS)
@quick_option("Tiny models and few rounds: whether it works, not how fast it is.")
@timeout_option(600)
def pipeline(
    run: BenchRun,
    sizes: str | None,
    engines: str,
    workloads: str,
    schedules: str,
    chunks: int,
    rounds: int,
    steps: int,
    quick: bool,
    timeout: float,
) -> None:
    """Time training steps in pipeline stages with this library and torch.distributed.pipelining, in jobs that alternate.

    Reports for each schedule the time of a step, its ratio to torch's, the speed-up over one rank without stages as a part
    of what the schedule allows, memory of the largest stage, and bytes sent. Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.pipeline.job import Job, RankResult

    chosen = split_names("--engines", engines, CONTENDERS)
    names = split_names("--workloads", workloads, WORKLOADS)
    kinds = split_names("--schedules", schedules, SCHEDULES)
    counts = whole_numbers("--np", sizes or ("2" if quick else "2,4"), "ranks")
    for name in chosen:
        check_controller(CONTENDERS[name][2])
    settings: dict[str, Any] = {"engines": chosen, "np": counts, "workloads": names}
    settings |= {"schedules": kinds, "chunks": chunks, "rounds": rounds}
    cases = [Case(name, size, kind, chunks) for name in names for size in counts for kind in kinds]
    unstaged = {name: Case(name, 1, UNSTAGED, chunks) for name in names}
    costs: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    jobs = [(UNSTAGED, 1), *((name, size) for size in counts for name in chosen)]
    with run.progress(len(jobs) * rounds) as progress:
        for number, (name, size) in alternating(jobs, rounds):
            title, program, controller = CONTENDERS.get(name, (UNSTAGED, UNSTAGED, "gloo"))
            where = f"{title}, {size} ranks"
            progress.start(f"round {number + 1} of {rounds}, {where}")
            if where in failures:
                continue
            folder = run.jobs / f"round{number + 1}-np{size}-{name}"
            job = Job(
                folder, size, program, names, kinds, chunks, steps,
                warm_up=1 if quick else 2, quick=quick, costs=costs, details=number == 0,
            )  # fmt: skip
            try:
                ranks = run_job(job, RankResult, controller, timeout, threads=1)
            except JobError as error:
                failures[where] = str(error)
                if name == UNSTAGED:
                    break  # without costs there are no cuts
                continue
            costs.update(ranks[0].costs)
            mine = unstaged.values() if name == UNSTAGED else [case for case in cases if case.size == size]
            for case in mine:
                case.add(title, ranks)
            run.save(make_report(cases, unstaged, failures, settings))
    run.finish(make_report(cases, unstaged, failures, settings), success=not failures)


def make_report(
    cases: Sequence[Case],
    unstaged: dict[str, Case],
    failures: dict[str, str],
    settings: dict[str, Any],
) -> Report:
    """The report of all cases so far."""
    titles = [CONTENDERS[name][0] for name in settings["engines"]]
    results = []
    for workload, whole in unstaged.items():
        results.append(_result(whole, UNSTAGED, whole))
        results += [
            _result(case, title, whole) for case in cases if case.workload == workload for title in titles
        ]
    table = Table(COLUMNS, [_row(one) for one in results], left=("workload", "schedule", "engine"), folded=3)
    return Report(
        "Pipeline stages, timed",
        machine_facts(1, settings),
        [table],
        results,
        remarks=[f"{where}: {why}" for where, why in failures.items()],
        notes=NOTES,
        draw=lambda folder: draw(folder, cases),
        settings=settings,
    )


def _result(case: Case, title: str, whole: Case) -> dict[str, Any]:
    seconds = case.seconds.get(title, [])
    return {
        "workload": case.workload,
        "np": case.size,
        "schedule": case.schedule,
        "engine": title,
        "jobs": seconds,
        "of_torch": quartiles_of_ratios(seconds, case.seconds.get(TORCH, [])),
        "of_ideal": case.of_ideal(title, whole.seconds.get(UNSTAGED, [])),
        "peak_bytes": case.peak_bytes.get(title),
        "recomputed_peak_bytes": case.recomputed_peak_bytes.get(title),
        "unstaged_peak_bytes": whole.peak_bytes.get(UNSTAGED),
        "sent_bytes": case.sent_bytes.get(title),
        "timelines": case.timelines.get(title),
    }


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    held, peak, recomputed = (result[f"{name}peak_bytes"] for name in ("unstaged_", "", "recomputed_"))
    return (
        *(str(result[name]) for name in ("workload", "np", "schedule", "engine")),
        shown(1000 * statistics.median(result["jobs"]) if result["jobs"] else None, ".0f"),
        "1" if result["engine"] == TORCH else shown(result["of_torch"], ".2f"),
        shown(result["of_ideal"], ".2f"),
        mebibytes(peak),
        shown(peak and held and peak / held, ".2f"),
        shown(recomputed and held and recomputed / held, ".2f"),
        mebibytes(result["sent_bytes"], ".2f"),
    )


def draw(folder: Path, cases: Sequence[Case]) -> list[str]:
    """A picture for each workload and number of ranks: the timeline of one step in each schedule, with a row for each rank."""
    files = []
    for workload, size in dict.fromkeys((case.workload, case.size) for case in cases):
        found = [
            (case, *next(iter(case.timelines.items())))
            for case in cases
            if (case.workload, case.size) == (workload, size) and case.timelines
        ]
        if found:
            files.append(_draw_timelines(folder / f"timeline-{workload}-np{size}.png", found))
    return files


def _draw_timelines(file: Path, found: Sequence[tuple[Case, str, list[list[Span]]]]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.2 + len(found) * (0.6 + 0.4 * found[0][0].size)), layout="constrained")
    for axes, (case, title, ranks) in zip(
        figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0], found
    ):
        begin = min(span.start for spans in ranks for span in spans)
        for rank, spans in enumerate(ranks):
            for kind, color in COLORS.items():  # waits and recomputations lie within passes, above them
                for span in (one for one in spans if one.kind == kind):
                    width = 1000 * (span.end - span.start)
                    edge = "white" if kind in ("forward", "backward") else "none"
                    axes.barh(
                        rank,
                        width,
                        0.8,
                        1000 * (span.start - begin),
                        color=color,
                        edgecolor=edge,
                        linewidth=0.5,
                    )
                    if kind in ("forward", "backward"):
                        middle = 1000 * (span.start - begin) + width / 2
                        axes.text(middle, rank, str(span.micro_batch), ha="center", va="center", fontsize=6)
        axes.set_title(f"{case.workload}, {case.schedule}, {title}", fontsize=9)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=8)
        axes.invert_yaxis()
    axes.set_xlabel("ms; numbers are micro-batches")
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8, frameon=False)
    return save_figure(figure, file)
