"""What a comparison found out: its conclusion, ``results.json`` for programs, ``report.md`` and plots for people."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hvd_ckpt.bench.compare import tables
from hvd_ckpt.bench.compare.cells import find_variant
from hvd_ckpt.bench.compare.verdict import BASELINE, Result
from hvd_ckpt.install.extras import say_no_pictures

__all__ = ["Report"]

REASON = 160  # characters


@dataclass
class Report:
    """Everything a comparison found out.

    Attributes:
        settings: what was asked for, as plain values.
        facts: machine and versions.
        workloads: for each workload its ``title``, ``line``, the reference's mean ``losses``, and whether it is ``small``.
        results: one per engine and cell.
        subject: the engine that must be right for the comparison to succeed.
        seconds: how long it took.
        absent: engines that cannot run here, and why.
        left_out: a line for each cell that cannot be planned: of which engine, and why.
    """

    settings: dict[str, Any]
    facts: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    results: list[Result]
    subject: str
    seconds: float
    absent: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether the subject is right in every cell."""
        mine = [result for result in self.results if result.engine == self.subject]
        return bool(mine) and all(result.right for result in mine)

    @property
    def conclusion(self) -> str:
        mine = [result for result in self.results if result.engine == self.subject]
        wrong = [result for result in mine if not result.right]
        if not mine:
            return f"{self.subject} has no cells to be right in."
        if not wrong:
            return f"{self.subject} is right in all {len(mine)} cells."
        names = ", ".join(f"{result.workload} {tables.recomputed(result)}" for result in wrong)
        return f"{self.subject} is not right in {len(wrong)} of {len(mine)} cells: {names}."

    @property
    def large(self) -> list[Result]:
        """The results of workloads whose time and memory mean something."""
        return [result for result in self.results if not self.workloads[result.workload].get("small")]

    @property
    def _planned(self) -> bool:
        """Whether there are planned cells."""
        return any(find_variant(result.variant).budget for result in self.results)

    def print(self, console: Console) -> None:
        """Print who is right where, the price of the larger workloads, what is wrong with the subject, the conclusion."""
        title = f"{self.settings['np']} ranks over {self.settings['controller']}"
        console.print(tables.terminal_matrix(title, self.results, self.absent))
        if self.large:
            console.print(tables.terminal_price(self.large))
        for engine, reason in self.absent.items():
            console.print(f"{engine} is absent: {reason}", highlight=False, markup=False)
        for note in [*self.left_out, *self.notes(self.subject)]:
            console.print(note, highlight=False, markup=False)
        console.print(self.conclusion, style="bold green" if self.right else "bold red", highlight=False)

    def notes(self, engine: str | None = None) -> list[str]:
        """One line for each result that is not right (of one engine, or of all): where, and why.

        Long reasons are cut; ``results.json`` has all of them.
        """
        return [
            f"{result.engine}, {result.workload} {tables.recomputed(result)}: {result.status}, "
            f"{textwrap.shorten(result.reason, REASON, placeholder=' ...')}"
            for result in self.results
            if not result.right and engine in (None, result.engine)
        ]

    def save(self, folder: Path) -> None:
        """Write ``results.json``, ``report.md`` and the plots into ``folder``."""
        values = {
            "right": self.right,
            "conclusion": self.conclusion,
            "subject": self.subject,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "facts": self.facts,
            "workloads": self.workloads,
            "absent": self.absent,
            "left_out": self.left_out,
            "results": [
                {**dataclasses.asdict(result), "right": result.right, "step_seconds": result.step_seconds}
                for result in self.results
            ],
        }
        text = json.dumps(_finite(values), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        plots = self._plot(folder)
        (folder / "report.md").write_text(self.markdown(plots), encoding="utf-8")

    def _plot(self, folder: Path) -> list[str]:
        """Draw the plots; returns their file names, none where matplotlib is not installed."""
        try:
            from hvd_ckpt.bench.compare import plots
        except ImportError as error:
            say_no_pictures(error)
            return []
        return plots.draw(folder, self.results, self.workloads, self.absent, self.settings)

    def markdown(self, plots: list[str]) -> str:
        """The report as a page of Markdown that shows the plots of these names."""
        lines = ["# Engines compared", "", self.conclusion, ""]
        lines += [f"- {name}: {value}" for name, value in {**self.facts, **self.settings}.items()]
        lines += [f"- took: {self.seconds:.0f} s", ""]
        lines += [f"![{Path(name).stem}]({name})" for name in plots]
        lines += ["", "## Who is right", "", *tables.markdown_matrix(self.results, self.absent), ""]
        lines += [f"- {engine} is absent: {reason}" for engine, reason in self.absent.items()]
        lines += [f"- {line}" for line in self.left_out]
        if self.large:
            lines += ["", "## Time and memory", "", *tables.markdown_price(self.large), "", PRICE]
        lines += ["", "## What was trained", ""]
        for name, workload in self.workloads.items():
            first, last = workload["losses"][0], workload["losses"][-1]
            lines.append(
                f"- {name}: {workload['title']} ({workload['line']}); loss from {first:.3f} to {last:.3f}"
            )
        lines += ["", "## Every cell", "", *tables.markdown_details(self.results)]
        lines += ["", "What is not right:", "", *(f"- {note}" for note in self.notes())]
        legend = [*LEGEND, *([PLANNED] if self._planned else [])]
        return "\n".join([*lines, "", "What the columns say:", "", *legend, ""])


PRICE = (
    "Step time as a ratio to stock Horovod without recomputation, and peak memory in MiB. A wrong result has its price in "
    "parentheses."
)

LEGEND = (
    "- recomputed: the checkpoint variant and the number of segments.",
    "- verdict: right; loose (right here, but a gradient is reduced more than once in a step, or two runs reduce in "
    "different orders); wrong; error; hang.",
    "- ranks: whether all ranks end with the same parameters, bit for bit.",
    "- weights, buffers: the largest difference of a parameter, of a buffer such as a batch norm's statistics, from one "
    "process that computes each rank's batch in turn, with that rank's random state and buffers, and averages the "
    "gradients. Right means that none is off by more than 0.1 % of what training changed (5 % where weights are bfloat16, "
    "2 % in mixed precision).",
    "- runs: whether repeated runs end in the same parameters and buffers, bit for bit, and how many there were.",
    "- reduced: how many reductions a parameter's gradient takes part in per step, fewest and most.",
    "- order: whether two runs reduce in the same order (for Horovod, as its timeline has it).",
    "- step ms: median time of a step after the first two; ratio: to the step time of stock Horovod in "
    f"the same pass (jobs alternate: A B C, then C B A): of its cell without recomputation, else of the same cell ({BASELINE}).",
    "- peak MiB: the most that PyTorch's allocator had handed out at one time during training, weights, gradients and "
    "optimizer included; communication threads' own buffers are not part of it.",
)

PLANNED = (
    "- plan: what is recomputed was left to `hvd_ckpt.plan` with that budget, for the peak of a step above its start; peak MiB "
    "counts from before the model is made. Other engines have no plans."
)


def _finite(value: Any) -> Any:
    """The value with numbers that JSON has no word for as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
