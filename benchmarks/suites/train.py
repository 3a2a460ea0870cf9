"""``python -m benchmarks train``: the training loop's overhead.

Exit status 0 if both loops ran and did the same, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.cases import (
    Case,
    Column,
    attributes,
    conditions,
    figure,
    results_of,
    table_of,
    yes_or_no,
)
from hvd_ckpt.app.compare.runner.jobs import RankJob
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Report
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    controller_setting,
    names_of,
    numbers_of,
    setting,
    timeout_setting,
)
from hvd_ckpt.app.compare.runner.stats import quartiles_of_ratios, slowest

NOTES = (
    "trainer: `hvd-ckpt train`, that is Trainer.run as it is, with its loader, schedule, micro-batches, report, log file and a log "
    "entry over all ranks every 10 steps (every round if it is shorter); no evaluation.",
    "by hand: a loop with the same calls of the library, the same data set and the same model: batches in the stream's order, "
    "prepared two ahead in one thread; learning rate from the schedule, zero_grad, one sum of the number of terms over the ranks, "
    "forward pass, loss and backward pass of each micro-batch weighed by its terms, synchronize, clip_grad_norm_, step; "
    "loss.item() as often as the trainer logs. It writes and prints nothing.",
    "ms: of a step; a round's time is that of its slowest rank, from a barrier on, divided by its steps; median over rounds.",
    "ratio: trainer over by hand in rounds that follow each other (A B, B A, ...), median with quartiles in brackets.",
    "same weights: whether weights and buffers of both are bit for bit the same after the same steps, on every rank.",
)


@dataclass(frozen=True)
class Settings(BenchSettings):
    """What is measured, and how often."""

    models: tuple[str, ...] = setting(
        "Models to train.", "bert-mini,gpt-tiny", type=names_of(find="hvd_ckpt.app.models.catalog:find")
    )
    accumulate: tuple[int, ...] = setting(
        "Numbers of micro-batches of a batch.", "1,4", type=numbers_of("micro-batches")
    )
    batch: int = setting("Samples of a step on each rank.", 4)
    ranks: int = setting("Number of ranks.", 2)
    rounds: int = setting("Timed rounds of each, alternating.", 15)
    steps: int = setting("Steps of a round.", 10)
    controller: str = controller_setting()
    timeout: float = timeout_setting()

    def check(self) -> None:
        if max(self.accumulate) > self.batch:
            raise BadArgument(
                f"--accumulate: a batch of {self.batch} has fewer samples than {max(self.accumulate)}: give a larger --batch"
            )


@dataclass(frozen=True)
class Job(RankJob):
    """One model, with steps of ``accumulate`` micro-batches."""

    worker = "benchmarks.train_loops:measure"

    model: str
    accumulate: int
    settings: Settings


def figures_of(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a case, from those that each rank has found; without ranks they are empty."""
    return {
        "threads": max((rank["threads"] for rank in ranks), default=0),
        **{loop: slowest(rank[loop] for rank in ranks) for loop in ("trainer", "by_hand")},
        "differences": sorted({name for rank in ranks for name in rank["differences"]}),
    }


def passed(case: Case) -> bool:
    """Whether both loops ran and did the same."""
    return case.failure is None and not case.figures["differences"]


def _median(rounds: Sequence[float]) -> float | None:
    return 1000 * statistics.median(rounds) if rounds else None


COLUMNS = (
    *conditions("model", left=("model",)),
    Column("micro-batches", lambda case: case.at["accumulate"], key="accumulate"),
    Column("trainer ms", lambda case: case.figure("trainer", _median), ".1f"),
    Column("by hand ms", lambda case: case.figure("by_hand", _median), ".1f"),
    Column(
        "ratio",
        lambda case: quartiles_of_ratios(case.figures["trainer"], case.figures["by_hand"]),
        ".3f",
        key="ratio",
    ),
    Column(
        "same weights",
        lambda case: "failed" if case.failure else yes_or_no(not case.figures["differences"]),
        left=True,
    ),
    *(figure(name) for name in ("threads", "trainer", "by_hand", "differences")),
    *attributes("failure"),
    Column("", passed, key="passed"),
)


@bench_command(Settings)
def train(run: BenchRun, settings: Settings) -> None:
    """Time what `hvd-ckpt train` adds to a step, beside a loop written by hand with the same calls.

    Both train the same model on the same batches in the same processes, in rounds that alternate, and must come to the same weights
    bit for bit. Run it on a machine that does nothing else.
    """
    cases: list[Case] = []
    run.make_report = lambda: make_report(run, cases)
    models = list(itertools.product(enumerate(settings.models), settings.accumulate))
    with run.progress(len(models)) as progress:
        for (number, model), count in models:
            name = f"{model}, {count} micro-batches"
            job = Job(run.jobs / f"{number}-{count}", settings.ranks, model, count, settings)
            case = Case("", {"model": model, "accumulate": count})
            case.figures = figures_of(progress.job(name, job, dict[str, Any]))
            case.failure = run.failures.get(name)
            cases.append(case)
    run.finish(success=all(map(passed, cases)))


def make_report(run: BenchRun, cases: Sequence[Case]) -> Report:
    """The report of the cases so far."""
    report = run.report(
        "The training loop beside a loop written by hand",
        [table_of(COLUMNS, cases, folded=1)],
        results_of(COLUMNS, cases),
        {"threads per rank": max((case.figures["threads"] for case in cases), default=0)},
        notes=NOTES,
    )
    report.remarks += [
        f"{case.at['model']}, {case.at['accumulate']} micro-batches: weights or buffers differ: {', '.join(differences)}"
        for case in cases
        if (differences := case.figures["differences"])
    ]
    return report
