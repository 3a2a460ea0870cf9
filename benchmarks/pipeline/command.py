"""``python -m benchmarks pipeline``: the jobs of the engines in turn, the table of their steps, and the timeline of one of ours.

Exit status 0 if every engine was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ckpt.app.cli.command_line import check_controller
from hvd_ckpt.app.compare.runner.cases import (
    Case,
    Column,
    conditions,
    figure,
    find_case,
    in_mib,
    median_in_ms,
    results_of,
    table_of,
)
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.compare.runner.options import ONE_THREAD, BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Report, save_figure
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    names_of,
    quick_setting,
    ranks_setting,
    setting,
    timeout_setting,
)
from hvd_ckpt.app.compare.runner.stats import Quartiles, alternating, quartiles_of_ratios

UNSTAGED = "unstaged"
ENGINES = {  # by the name of the option: the title, the program of the ranks, the controller
    "mpi": ("hvd_ckpt, MPI", "hvd_ckpt", "mpi"),
    "gloo": ("hvd_ckpt, Gloo", "hvd_ckpt", "gloo"),
    "torch": ("torch, Gloo", "torch", "gloo"),
}
VIRTUAL = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Chunks of the model on each rank, by schedule."""
WORKLOADS = ("gpt", "resnet")
TORCH = ENGINES["torch"][0]
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


@dataclass(frozen=True)
class Settings(BenchSettings):
    """What is measured, and how often."""

    sizes: tuple[int, ...] = ranks_setting("Numbers of ranks, one for each stage.")
    engines: tuple[str, ...] = setting(
        "Ours over MPI, over Gloo; torch.", ",".join(ENGINES), type=names_of(ENGINES)
    )
    workloads: tuple[str, ...] = setting("Workloads to train.", ",".join(WORKLOADS), type=names_of(WORKLOADS))
    schedules: tuple[str, ...] = setting("Schedules.", ",".join(VIRTUAL), type=names_of(VIRTUAL))
    chunks: int = setting("Micro-batches of a step.", 8)
    rounds: int = setting("Jobs per engine, alternating.", 5, quick=1)
    steps: int = setting("Timed steps per job.", 5, quick=1)
    quick: bool = quick_setting("Tiny models and few rounds: whether it works, not how fast it is.")
    timeout: float = timeout_setting(600)

    def check(self) -> None:
        for name in self.engines:
            check_controller(ENGINES[name][2])


@dataclass(frozen=True)
class Job(RankJob):
    """One engine's ranks, one for each stage.

    Attributes:
        program: a name in :data:`PROGRAMS`.
        cuts: of each workload into each number of chunks; empty for the unstaged model, whose first job finds them.
        details: also measure peaks, bytes and a timeline.
    """

    worker = "benchmarks.pipeline.job:measure"

    program: str
    settings: Settings
    cuts: dict[str, dict[int, list[int]]]
    details: bool


@dataclass
class Span:
    """Part of a step: a forward or backward pass, a recomputation within the latter, a wait within either.

    Attributes:
        start, end: seconds of the machine's monotonic clock, the same for all its processes.
    """

    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float


Figures = dict[str, Any]
"""The measurements of one workload in one schedule on one rank.

``seconds``: of each timed step. With details also, each with the key of a figure in the report:

``peak_bytes``: parameters, buffers, optimizer state, and the most that a step adds to them. ``recomputed_peak_bytes``: the same
with ``checkpoint="always"``. ``sent_bytes``: of a step. ``timelines``: of a step, with ``checkpoint="always"``.
"""


@dataclass
class RankResult:
    """The measurements of one rank: by workload and schedule, and the cuts by workload and number of chunks."""

    figures: dict[str, dict[str, Figures]] = field(default_factory=dict)
    cuts: dict[str, dict[int, list[int]]] = field(default_factory=dict)


@bench_command(Settings, width=150)
def pipeline(run: BenchRun, settings: Settings) -> None:
    """Time training steps in pipeline stages with this library and torch.distributed.pipelining, in jobs that alternate.

    Reports for each schedule the time of a step, its ratio to torch's, the speed-up over one rank without stages as a part
    of what the schedule allows, memory of the largest stage, and bytes sent. Run it on a machine that does nothing else.
    """
    cases = []
    for name in settings.workloads:
        cases.append(Case(UNSTAGED, {"workload": name, "np": 1, "schedule": UNSTAGED}))
        cases += [
            Case(ENGINES[engine][0], {"workload": name, "np": size, "schedule": schedule})
            for size in settings.sizes
            for schedule in settings.schedules
            for engine in settings.engines
        ]
    cuts: dict[str, dict[int, list[int]]] = {}
    jobs = [(UNSTAGED, 1), *((name, size) for size in settings.sizes for name in settings.engines)]
    run.make_report = functools.partial(make_report, run, settings, cases)
    with run.progress(len(jobs) * settings.rounds) as progress:
        for number, (name, size) in alternating(jobs, settings.rounds):
            engine, program, controller = ENGINES.get(name, (UNSTAGED, UNSTAGED, "gloo"))
            where = f"{engine}, {size} ranks"
            ranks = progress.job(
                f"round {number + 1} of {settings.rounds}, {where}",
                Job(
                    run.jobs / f"round{number + 1}-np{size}-{name}",
                    size,
                    program,
                    settings,
                    cuts,
                    number == 0,
                ),
                RankResult,
                name=where,
                controller=controller,
                threads=1,
            )
            if name == UNSTAGED and where in run.failures:
                break  # without it there are no cuts
            for case in cases:
                if (case.engine, case.at["np"]) == (engine, size):
                    case.add([rank.figures[case.at["workload"]][case.at["schedule"]] for rank in ranks])
            cuts.update(ranks[0].cuts if ranks else {})
    run.finish()


def make_report(run: BenchRun, settings: Settings, cases: Sequence[Case]) -> Report:
    """The report of all cases so far."""
    whole = {case.at["workload"]: case for case in cases if case.engine == UNSTAGED}

    def of_torch(case: Case) -> Quartiles | None:
        return case.ratio(find_case(cases, TORCH, case.at))

    def of_ideal(case: Case) -> Quartiles | None:
        if case.engine == UNSTAGED:
            return None
        size, virtual = case.at["np"], VIRTUAL[case.at["schedule"]]
        # A schedule of p ranks with m micro-batches in v chunks each takes m v + p - 1 slots for
        # each direction, of which a rank works in m v:
        #
        #     rank 0   F0 F1 F2 F3 -  -  B3 B2 B1 B0       p = 2, m = 4, v = 1: one slot of each direction is idle
        #     rank 1   -  F0 F1 F2 F3 B3 B2 B1 B0 -
        passes = settings.chunks * virtual
        ideal = size * passes / (passes + size - 1)
        unstaged = whole[case.at["workload"]].seconds
        return quartiles_of_ratios([seconds / ideal for seconds in unstaged], case.seconds)

    def held(case: Case) -> Any:
        return whole[case.at["workload"]].figure("peak_bytes", max)

    def of_unstaged(case: Case, name: str) -> float | None:
        peak, whole_peak = case.figure(name, max), held(case)
        return peak / whole_peak if peak and whole_peak else None

    columns = [
        *conditions("workload", "np", "schedule", left=("workload", "schedule")),
        Column("engine", lambda case: case.engine, key="engine", left=True),
        Column("", lambda case: case.seconds, key="jobs"),
        Column("step ms", lambda case: case.step, median_in_ms(".0f")),
        Column("of torch", of_torch, ".2f", key="of_torch", itself=TORCH),
        Column("of ideal", of_ideal, ".2f", key="of_ideal"),
        figure("peak_bytes", max, "peak MiB", in_mib()),
        Column("of unstaged", lambda case: of_unstaged(case, "peak_bytes"), ".2f"),
        Column("", held, key="unstaged_peak_bytes"),
        Column("recomputing", lambda case: of_unstaged(case, "recomputed_peak_bytes"), ".2f"),
        figure("recomputed_peak_bytes", max),
        figure("sent_bytes", sum, "sent MiB", in_mib(".2f")),
        figure("timelines"),
    ]
    tables, results = [table_of(columns, cases, folded=3)], results_of(columns, cases)
    return run.report(
        "Pipeline stages, timed",
        tables,
        results,
        ONE_THREAD,
        notes=NOTES,
        draw=lambda folder: draw(folder, cases),
    )


def draw(folder: Path, cases: Sequence[Case]) -> list[str]:
    """A picture for each workload and number of ranks: the timeline of one step in each schedule, with a row for each rank."""
    groups: dict[str, dict[str, Case]] = {}
    for case in cases:
        if "timelines" in case.figures:
            group = groups.setdefault(f"timeline-{case.at['workload']}-np{case.at['np']}.png", {})
            group.setdefault(case.at["schedule"], case)
    return [_draw_timelines(folder / name, list(group.values())) for name, group in groups.items()]


def _draw_timelines(file: Path, cases: Sequence[Case]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.2 + len(cases) * (0.6 + 0.4 * cases[0].at["np"])), layout="constrained")
    for axes, case in zip(figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0], cases):
        ranks = [[Span(**span) for span in spans] for spans in case.figures["timelines"]]
        begin = min(span.start for spans in ranks for span in spans)
        for rank, spans in enumerate(ranks):
            # Waits and recomputations lie within passes: in the order of COLORS they are drawn above them.
            for kind, color in COLORS.items():
                for span in (span for span in spans if span.kind == kind):
                    width = 1000 * (span.end - span.start)
                    edge = "white" if kind in ("forward", "backward") else "none"
                    left = 1000 * (span.start - begin)
                    axes.barh(rank, width, 0.8, left, color=color, edgecolor=edge, linewidth=0.5)
                    if kind in ("forward", "backward"):
                        axes.text(
                            left + width / 2,
                            rank,
                            str(span.micro_batch),
                            ha="center",
                            va="center",
                            fontsize=6,
                        )
        axes.set_title(f"{case.at['workload']}, {case.at['schedule']}, {case.engine}", fontsize=9)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=8)
        axes.invert_yaxis()
    axes.set_xlabel("ms; numbers are micro-batches")
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8, frameon=False)
    return save_figure(figure, file)
