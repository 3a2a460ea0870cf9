"""The table in the terminal, ``results.json`` for programs and ``report.md`` for people."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.comparison.verdict import BASELINE, TOLERANCE, Result

__all__ = ["Report", "machine_facts"]

COLUMNS = (
    "workload", "recomputed", "engine", "ranks", "weights", "buffers", "runs", "step ms", "ratio", "peak MiB", "verdict"
)  # fmt: skip
NUMBERS = ("step ms", "ratio", "peak MiB")
MIB = 1 << 20


@dataclass
class Report:
    """Everything a comparison found out.

    Attributes:
        settings: what was asked for, as plain values.
        facts: machine and versions.
        workloads: for each workload its ``title``, ``line`` and the reference's mean ``losses``.
        results: one per engine and cell.
        subject: the engine that must be right for the comparison to succeed.
        seconds: how long it took.
    """

    settings: dict[str, Any]
    facts: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    results: list[Result]
    subject: str
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the subject is right in every cell."""
        mine = [result for result in self.results if result.engine == self.subject]
        return bool(mine) and all(result.right for result in mine)

    @property
    def conclusion(self) -> str:
        mine = [result for result in self.results if result.engine == self.subject]
        wrong = [result for result in mine if not result.right]
        if not wrong:
            return f"{self.subject} is right in all {len(mine)} cells."
        names = ", ".join(f"{result.workload} {_recomputed(result)}" for result in wrong)
        return f"{self.subject} is not right in {len(wrong)} of {len(mine)} cells: {names}."

    def print(self, console: Console) -> None:
        """Print the table, what is wrong where, and the conclusion."""
        table = Table(
            title=f"{self.settings['np']} ranks over {self.settings['controller']}",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
        before: tuple[str, int] | None = None
        for result in self.results:
            cell = (result.workload + result.variant, result.chunks)
            style = "" if result.right else "red" if result.engine == self.subject else "yellow"
            row = _row(result)
            if cell == before:
                row = ("", "", *row[2:])
            elif before:
                table.add_section()
            table.add_row(*row, style=style)
            before = cell
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False, overflow="ellipsis", no_wrap=True)
        console.print(self.conclusion, style="bold green" if self.right else "bold red", highlight=False)

    @property
    def notes(self) -> list[str]:
        """One line for each result that is not right: where, and why."""
        return [
            f"{result.engine}, {result.workload} {_recomputed(result)}: {result.status}, {result.reason}"
            for result in self.results
            if not result.right
        ]

    def save(self, folder: Path) -> None:
        """Write ``results.json`` and ``report.md`` into ``folder``."""
        values = {
            "right": self.right,
            "conclusion": self.conclusion,
            "subject": self.subject,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "facts": self.facts,
            "workloads": self.workloads,
            "results": [{**dataclasses.asdict(result), "right": result.right} for result in self.results],
        }
        text = json.dumps(_finite(values), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report as a page of Markdown."""
        lines = ["# Engines compared", "", self.conclusion, ""]
        lines += [f"- {name}: {value}" for name, value in {**self.facts, **self.settings}.items()]
        lines += [f"- took: {self.seconds:.0f} s", ""]
        for name, workload in self.workloads.items():
            first, last = workload["losses"][0], workload["losses"][-1]
            lines.append(
                f"**{name}**: {workload['title']} ({workload['line']}); loss from {first:.3f} to {last:.3f}."
            )
            lines.append("")
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(_row(result)) + " |" for result in self.results]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join([*lines, "", "What the columns say:", "", *_LEGEND, ""])


_LEGEND = (
    "- recomputed: the checkpoint variant and the number of segments.",
    "- ranks: whether all ranks end with the same parameters, bit for bit.",
    "- weights, buffers: the largest difference of a parameter, of a buffer such as a batch norm's statistics, from one "
    "process that computes each rank's batch in turn, with that rank's random state and buffers, and averages the "
    f"gradients. Right means that none is off by more than {TOLERANCE:g} of what training changed.",
    "- runs: whether repeated runs end in the same parameters and buffers, bit for bit, and how many there were.",
    "- step ms: median time of a step after the first two; ratio: to the step time of the engine "
    f"{BASELINE} without recomputation, in the same pass (jobs alternate: A B C, then C B A).",
    "- peak MiB: the most that PyTorch's allocator had handed out at one time during training, weights, gradients and "
    "optimizer included; communication threads' own buffers are not part of it.",
)


def machine_facts(threads: int) -> dict[str, Any]:
    """What a number needs beside it: machine and versions."""
    versions = {}
    for package in ("torch", "horovod", "transformers", "scikit-learn"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{platform.system()} {platform.machine()}, {cpus} CPUs, {threads} thread(s) per rank",
        "python": platform.python_version(),
        **versions,
    }


def _recomputed(result: Result) -> str:
    return result.variant if not result.chunks else f"{result.variant} x{result.chunks}"


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.workload,
        _recomputed(result),
        result.engine.rpartition(":")[2],
        _told(result.ranks_equal, "equal", "DIFFER"),
        _distance(result.difference, result.weights_right),
        _distance(result.buffer_difference, result.buffers_right),
        _told(result.repeatable, f"{result.runs} equal", f"{result.runs} DIFFER"),
        "-" if result.step_seconds is None else f"{1000 * result.step_seconds:.0f}",
        "-" if result.ratio is None else f"{result.ratio:.2f}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / MIB:.1f}",
        result.status if result.right else result.status.upper(),
    )


def _told(value: bool | None, yes: str, no: str) -> str:
    return "-" if value is None else yes if value else no


def _distance(difference: float | None, right: bool | None) -> str:
    if difference is None:
        return "-"
    if difference == 0:
        return "exact"
    return f"{difference:.1e}" if right else f"OFF {difference:.0e}"


def _finite(value: Any) -> Any:
    """The value with numbers that JSON has no word for as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
