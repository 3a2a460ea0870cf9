"""What the rounds say: ratios, verdicts and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_ckpt.bench.reduce import Quartiles, quartiles, ratios
from hvd_ckpt.bench.table_report import TableReport
from hvd_ckpt.bench.train.job import Answer

__all__ = ["COLUMNS", "WANTED", "Case", "Report"]

WANTED = 1.02
COLUMNS = ("model", "micro-batches", "trainer ms", "by hand ms", "ratio", "same weights")
NOTES = (
    "trainer: `hvd-ckpt train`, that is Trainer.run as it is, with its loader, schedule, micro-batches, report, log file and a log "
    "entry over all ranks every 10 steps (every round if it is shorter); no evaluation and no snapshot.",
    "by hand: a loop with the same calls of the library, the same data set and the same model: batches in the stream's order, "
    "prepared two ahead in one thread; learning rate from the schedule, zero_grad, one sum of the number of terms over the ranks, "
    "forward pass, loss and backward pass of each micro-batch weighed by its terms, synchronize, clip_grad_norm_, step; "
    "loss.item() as often as the trainer logs. It writes and prints nothing.",
    "ms: of a step; a round's time is that of its slowest rank, from where all ranks have met, divided by its steps; median over "
    "rounds.",
    "ratio: trainer over by hand in rounds that follow each other (A B, B A, ...), median with quartiles in brackets.",
    "same weights: whether weights and buffers of both are bit for bit the same after the same steps, on every rank.",
)


@dataclass
class Case:
    """One model with one number of micro-batches.

    Attributes:
        trainer, by_hand: seconds of a step in each round, on the slowest rank.
        differences: weights and buffers that are not the same on some rank.
        failure: why there is nothing.
    """

    model: str
    accumulate: int
    threads: int = 0
    trainer: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def of(cls, model: str, accumulate: int, steps: int, answers: Sequence[Answer]) -> Case:
        """What the answers of all ranks say about rounds of so many steps."""
        return cls(
            model,
            accumulate,
            answers[0].threads,
            [max(times) / steps for times in zip(*(answer.trainer for answer in answers), strict=True)],
            [max(times) / steps for times in zip(*(answer.by_hand for answer in answers), strict=True)],
            sorted({name for answer in answers for name in answer.differences}),
            next((answer.failure for answer in answers if answer.failure is not None), None),
        )

    @property
    def title(self) -> str:
        return f"{self.model}, {self.accumulate} micro-batch{'es' * (self.accumulate > 1)}"

    @property
    def sound(self) -> bool:
        """Whether it ran, and both loops did the same."""
        return self.failure is None and not self.differences

    @property
    def ratio(self) -> Quartiles | None:
        """The trainer's time as a ratio to that by hand, over the rounds."""
        values = ratios(self.trainer, self.by_hand)
        return quartiles(values) if values else None

    def remark(self) -> str:
        """What is to be said of the case in one line."""
        if self.failure is not None:
            return f"{self.title}: failed: {self.failure}"
        if self.differences:
            return (
                f"{self.title}: the loops have not done the same: {len(self.differences)} weights or buffers differ, the first is "
                f"{self.differences[0]}"
            )
        assert self.ratio is not None
        met = "met" if self.ratio.median <= WANTED else "not met"
        return (
            f"{self.title}: {self.ratio.median:.3f} of the loop by hand, wanted at most {WANTED:.2f}: {met}"
        )

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        ratio = self.ratio
        if ratio is None:
            return (self.model, str(self.accumulate), "-", "-", "-", "failed")
        return (
            self.model,
            str(self.accumulate),
            f"{quartiles(self.trainer).median * 1000:.1f}",
            f"{quartiles(self.by_hand).median * 1000:.1f}",
            f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
            "no" if self.differences else "yes",
        )

    def result(self) -> dict[str, Any]:
        """The case for programs."""
        ratio = self.ratio
        ratio_of_both = ratio and dataclasses.asdict(ratio)
        return {**dataclasses.asdict(self), "ratio": ratio_of_both, "wanted": WANTED, "sound": self.sound}


class Report(TableReport[Case]):
    """Models and numbers of micro-batches."""

    title = "The training toolkit beside a loop written by hand"
    columns = COLUMNS
    to_the_left = ("model", "same weights")
    notes = NOTES

    def rows(self, case: Case) -> list[tuple[str, ...]]:
        return [case.row()]

    def result(self, case: Case) -> dict[str, Any]:
        return case.result()

    def remarks(self) -> list[str]:
        return [case.remark() for case in self.cases]

    def told(self) -> dict[str, str]:
        threads = max((case.threads for case in self.cases), default=0)
        listed = ("models", "accumulate")  # in the table
        settings = {name: str(value) for name, value in self.settings.items() if name not in listed}
        return {**settings, "threads per rank": str(threads)}
