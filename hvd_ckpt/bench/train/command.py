"""``hvd-ckpt bench train``: the training loop's overhead.

Exit status 0 if both loops ran and did the same, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError, RankJob, run_job
from hvd_ckpt.bench.harness.options import BenchRun, bench_command, job_options, whole_numbers
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts
from hvd_ckpt.bench.harness.stats import Quartiles, quartiles_of_ratios, slowest

COLUMNS = ("model", "micro-batches", "trainer ms", "by hand ms", "ratio", "same weights")
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
class Job(RankJob):
    """One model with one number of micro-batches.

    Attributes:
        model: a name of the catalogue.
        accumulate: micro-batches of a step.
        batch: samples of a step on each rank.
        rounds: timed rounds of each loop.
        steps: of a round.
    """

    worker = "hvd_ckpt.bench.train.loops"

    model: str
    accumulate: int
    batch: int
    rounds: int
    steps: int


@dataclass
class RankResult:
    """The measurements of one rank.

    Attributes:
        threads: CPU threads that PyTorch used.
        trainer, by_hand: seconds of each round of the two loops.
        differences: weights and buffers that differ between the models of both after the same steps.
    """

    threads: int
    trainer: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@dataclass
class Case:
    """One model with one number of micro-batches.

    Attributes:
        trainer, by_hand: seconds of a step in each round, on the slowest rank.
        differences: weights and buffers that differ between the loops on some rank.
        failure: why there is no result.
    """

    model: str
    accumulate: int
    threads: int = 0
    trainer: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None

    def add(self, steps: int, ranks: Sequence[RankResult]) -> None:
        """Adds the results of all ranks, over rounds of so many steps."""
        self.threads = ranks[0].threads
        self.trainer = [seconds / steps for seconds in slowest(rank.trainer for rank in ranks)]
        self.by_hand = [seconds / steps for seconds in slowest(rank.by_hand for rank in ranks)]
        self.differences = sorted({name for rank in ranks for name in rank.differences})

    @property
    def passed(self) -> bool:
        """Whether both loops ran and did the same."""
        return self.failure is None and not self.differences

    @property
    def ratio(self) -> Quartiles | None:
        """The trainer's time as a ratio to that by hand, over the rounds."""
        return quartiles_of_ratios(self.trainer, self.by_hand)

    def remark(self) -> str:
        """Why the case did not pass, in one line."""
        differ = ", ".join(self.differences[:1]) + ", ..." * (len(self.differences) > 1)
        why = f"failed: {self.failure}" if self.failure else f"weights or buffers differ: {differ}"
        return f"{self.model}, {self.accumulate} micro-batches: {why}"

    def row(self) -> tuple[str, ...]:
        """The entries of the table."""
        name, ratio = (self.model, str(self.accumulate)), self.ratio
        if ratio is None:
            return (*name, "-", "-", "-", "failed")
        times = (f"{statistics.median(times) * 1000:.1f}" for times in (self.trainer, self.by_hand))
        return (*name, *times, f"{ratio:.3f}", "no" if self.differences else "yes")


@bench_command("train")
@click.option("--models", default="bert-mini,gpt-tiny", show_default=True, help="Models to train.")
@click.option("--accumulate", default="1,4", show_default=True, help="Numbers of micro-batches of a batch.")
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Samples of a step on each rank."
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Timed rounds of each, alternating.",
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of a round.")
@job_options
def train(
    run: BenchRun,
    models: str,
    accumulate: str,
    batch: int,
    ranks: int,
    rounds: int,
    steps: int,
    controller: str,
    timeout: float,
) -> None:
    """Time what `hvd-ckpt train` adds to a step, beside a loop written by hand with the same calls.

    Both train the same model on the same batches in the same processes, in rounds that alternate, and must come to the same weights
    bit for bit. Run it on a machine that does nothing else.
    """
    from hvd_ckpt.app.models import catalog

    names = split_names("--models", models, find=catalog.find)
    counts = whole_numbers("--accumulate", accumulate, "micro-batches")
    if max(counts) > batch:
        raise BadArgument(
            f"--accumulate: a batch of {batch} has fewer samples than {max(counts)}: give a larger --batch"
        )
    carrier = check_controller(controller)
    settings = {"batch": batch, "ranks": ranks, "rounds": rounds, "steps": steps, "controller": carrier}
    cases: list[Case] = []
    with run.progress(len(names) * len(counts)) as progress:
        for (number, name), count in itertools.product(enumerate(names), counts):
            progress.start(f"{name}, {count} micro-batches")
            cases.append(case := Case(name, count))
            try:
                job = Job(run.jobs / f"{number}-{count}", ranks, name, count, batch, rounds, steps)
                case.add(steps, run_job(job, RankResult, carrier, timeout))
            except JobError as error:
                case.failure = str(error)
            report = make_report(cases, settings)
            run.save(report)  # a long run that is ended leaves what it has found
    run.finish(report, success=all(case.passed for case in cases))


def make_report(cases: Sequence[Case], settings: dict[str, Any]) -> Report:
    """The report of the cases so far."""
    threads = max(case.threads for case in cases)
    return Report(
        "The training loop beside a loop written by hand",
        machine_facts(settings={**settings, "threads per rank": threads}),
        [Table(COLUMNS, [case.row() for case in cases], left=("model", "same weights"), folded=1)],
        [{**vars(case), "ratio": case.ratio, "passed": case.passed} for case in cases],
        remarks=[case.remark() for case in cases if not case.passed],
        notes=NOTES,
        settings=settings,
    )
