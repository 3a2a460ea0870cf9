"""``hvd-ckpt bench train``: the training loop's overhead.

Exit status 0 if both loops ran and did the same, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from hvd_ckpt.bench.harness.jobs import JobError, RankJob, run_job
from hvd_ckpt.bench.harness.options import BenchRun, bench_command, whole_numbers
from hvd_ckpt.bench.harness.report import Report, Table, machine_facts, plain
from hvd_ckpt.bench.harness.stats import Quartiles, quartiles, quartiles_of_ratios, slowest
from hvd_ckpt.command_line import BadArgument, check_controller, job_options, split_names
from hvd_ckpt.models import catalog

__all__ = ["Case", "Job", "RankResult", "train"]

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

    @classmethod
    def of(cls, model: str, accumulate: int, steps: int, ranks: Sequence[RankResult]) -> Case:
        """The case from the results of all ranks, over rounds of so many steps."""
        return cls(
            model,
            accumulate,
            ranks[0].threads,
            [seconds / steps for seconds in slowest(rank.trainer for rank in ranks)],
            [seconds / steps for seconds in slowest(rank.by_hand for rank in ranks)],
            sorted({name for rank in ranks for name in rank.differences}),
        )

    @property
    def passed(self) -> bool:
        """Whether both loops ran and did the same."""
        return self.failure is None and not self.differences

    @property
    def ratio(self) -> Quartiles | None:
        """The trainer's time as a ratio to that by hand, over the rounds."""
        return quartiles_of_ratios(self.trainer, self.by_hand)

    def remark(self) -> str | None:
        """Why the case did not pass, in one line."""
        title = f"{self.model}, {self.accumulate} micro-batch{'es' * (self.accumulate > 1)}"
        if self.failure is not None:
            return f"{title}: failed: {self.failure}"
        if self.differences:
            return (
                f"{title}: the loops did not do the same: {len(self.differences)} weights or buffers differ, "
                f"the first is {self.differences[0]}"
            )
        return None

    def row(self) -> tuple[str, ...]:
        """The entries of the table."""
        ratio = self.ratio
        if ratio is None:
            return (self.model, str(self.accumulate), "-", "-", "-", "failed")
        return (
            self.model,
            str(self.accumulate),
            f"{quartiles(self.trainer).median * 1000:.1f}",
            f"{quartiles(self.by_hand).median * 1000:.1f}",
            f"{ratio:.3f}",
            "no" if self.differences else "yes",
        )


@bench_command("train")
@click.option("--models", default="bert-mini,gpt-tiny", show_default=True, help="Models to train.")
@click.option(
    "--accumulate",
    default="1,4",
    show_default=True,
    help="Numbers of micro-batches that a batch is split into.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Samples of a step on each rank."
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Timed rounds of each loop, alternating.",
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
    names = split_names("--models", models, find=catalog.find)
    counts = whole_numbers("--accumulate", accumulate, "micro-batches")
    if max(counts) > batch:
        raise BadArgument(
            f"--accumulate: a batch of {batch} has fewer samples than {max(counts)}: give a larger --batch"
        )
    carrier = check_controller(controller)
    settings = {
        "models": names,
        "accumulate": counts,
        "batch": batch,
        "ranks": ranks,
        "rounds": rounds,
        "steps": steps,
        "controller": carrier,
    }
    cases: list[Case] = []
    with run.progress(len(names) * len(counts)) as progress:
        for number, name in enumerate(names):
            for count in counts:
                progress.start(f"{name}, {count} micro-batches")
                job = Job(run.jobs / f"{number}-{count}", ranks, name, count, batch, rounds, steps)
                try:
                    case = Case.of(name, count, steps, run_job(job, RankResult, carrier, timeout))
                except JobError as error:
                    case = Case(name, count, failure=str(error))
                cases.append(case)
                run.save(make_report(cases, settings))  # a long run that is ended leaves what it has found
    run.finish(make_report(cases, settings), success=all(case.passed for case in cases))


def make_report(cases: Sequence[Case], settings: dict[str, Any]) -> Report:
    """The report of the cases so far."""
    listed = ("models", "accumulate")  # in the table
    facts = {
        **machine_facts(),
        **{name: str(value) for name, value in settings.items() if name not in listed},
        "threads per rank": str(max((case.threads for case in cases), default=0)),
    }
    return Report(
        "The training loop beside a loop written by hand",
        facts,
        [Table(COLUMNS, [case.row() for case in cases], left=("model", "same weights"), folded=1)],
        [{**plain(case), "ratio": case.ratio, "passed": case.passed} for case in cases],
        remarks=[remark for case in cases if (remark := case.remark())],
        notes=NOTES,
        settings=settings,
    )
