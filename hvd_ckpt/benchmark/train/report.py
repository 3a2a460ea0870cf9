"""What the rounds say: ratios and verdicts, the table in the terminal, ``results.json`` and ``report.md``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.benchmark.reduce import Quartiles, quartiles, ratios
from hvd_ckpt.benchmark.train.job import Answer
from hvd_ckpt.json_file import write_json

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
        return {**dataclasses.asdict(self), "ratio": ratio and dataclasses.asdict(ratio), "sound": self.sound}


@dataclass
class Report:
    """Everything the benchmark found out.

    Attributes:
        command: how to repeat it.
        facts: machine, versions, and environment variables that change what is measured.
        settings: what was asked for.
        cases: the results.
        seconds: how long it took.
    """

    command: str
    facts: dict[str, str]
    settings: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether all cases are."""
        return all(case.sound for case in self.cases)

    def print(self, console: Console) -> None:
        """Print the table and what stands beside it."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("model", "same weights") else "right")
        for case in self.cases:
            table.add_row(*case.row())
        console.print(table)
        beside = [f"{name}: {value}" for name, value in self._beside().items()]
        for line in (*(case.remark() for case in self.cases), *beside):
            console.print(line, highlight=False, markup=False)

    def save(self, folder: Path) -> None:
        """Write ``results.json`` and ``report.md`` into ``folder``, over those of before."""
        values = {
            **self._beside(),
            "settings": self.settings,
            "wanted": WANTED,
            "results": [case.result() for case in self.cases],
        }
        write_json(values, folder / "results.json")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report as a page of Markdown."""
        lines = ["# The training toolkit beside a loop written by hand", ""]
        lines += [f"- {name}: {value}" for name, value in self._beside().items()]
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(case.row()) + " |" for case in self.cases]
        lines += ["", *(f"- {line}" for line in (*(case.remark() for case in self.cases), *NOTES)), ""]
        return "\n".join(lines)

    def _beside(self) -> dict[str, str]:
        told = {
            name: str(value) for name, value in self.settings.items() if name not in ("models", "accumulate")
        }
        threads = max((case.threads for case in self.cases), default=0)
        return {
            **self.facts,
            **told,
            "threads per rank": str(threads),
            "took": f"{self.seconds:.0f} s",
            "command": self.command,
        }
