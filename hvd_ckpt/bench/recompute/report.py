"""The tables in the terminal, ``results.json`` for programs, ``report.md`` for people, and a picture."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.bench.harness.stats import Quartiles
from hvd_ckpt.bench.recompute.case import WANTED_SMALLEST, Case
from hvd_ckpt.bench.recompute.contenders import KEEP
from hvd_ckpt.bench.recompute.measure import Entry
from hvd_ckpt.install.extras import say_no_pictures

__all__ = ["COLUMNS", "PICTURE", "PLAN_COLUMNS", "Report"]

MIB = 1 << 20
PICTURE = "recompute.png"
COLUMNS = (
    "contender",
    "peak MiB",
    "of keep",
    "time of keep",
    "result",
    "our peak MiB",
    "our time of it",
    "wanted",
    "met",
)
PLAN_COLUMNS = (
    "our plan", "peak MiB", "of keep", "time of keep", "result", "peak of predicted", "time of predicted", "made for"
)  # fmt: skip
NOTES = (
    "peak: exact bytes that one step (forward pass, loss, backward pass) has allocated at most above its start, with the "
    "gradients of the parameters allocated before it; of keep: as a ratio to the step that keeps everything.",
    "time of keep, our time of it: the time of a step as a ratio to that of keeping everything, and that of our plan as a "
    "ratio to the contender's, between steps of the same round (rounds alternate: A B C, then C B A); median over "
    "rounds, quartiles in brackets. Below 1 is faster.",
    "result: bitwise where loss, gradients and buffers are those of keeping everything, else what differs (gradients as a "
    "part of the largest value).",
    "our peak, our time: those of the plan made with the contender's measured peak as its budget; met: that plan's peak is no "
    "higher, and its time at most the ratio wanted.",
    "ckptplan measures no bytes on a CPU and refuses to plan there; it was given the bytes that this library measures.",
)


@dataclass
class Report:
    """Everything a benchmark found out.

    Attributes:
        command: how to repeat it.
        facts: machine, versions, device.
        settings: what was asked for.
        cases: the results, of one workload each.
        seconds: how long it took.
    """

    command: str
    facts: dict[str, str]
    settings: dict[str, Any]
    cases: list[Case]
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether keeping everything and this library's plans ran everywhere, with the same results."""
        return all(case.sound for case in self.cases)

    def print(self, console: Console) -> None:
        """Print a table for each workload and what stands beside them."""
        for case in self.cases:
            console.print(_title(case), style="bold", highlight=False, markup=False)
            tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [(COLUMNS, contender_rows(case))]
            if case.plans:
                tables.append((PLAN_COLUMNS, plan_rows(case)))
            for columns, rows in tables:
                table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
                for number, name in enumerate(columns):
                    table.add_column(
                        name, justify="left" if name in ("result", "made for") or not number else "right"
                    )
                for row in rows:
                    table.add_row(*row)
                console.print(table)
            for line in _remarks(case):
                console.print(line, highlight=False, markup=False)
            console.print()
        for name, value in self._beside().items():
            console.print(f"{name}: {value}", highlight=False, markup=False)

    def save(self, folder: Path) -> None:
        """Write ``results.json``, ``report.md`` and, with matplotlib, the picture into ``folder``, over those of before."""
        values = {
            **self._beside(),
            "settings": self.settings,
            "results": [_result(case) for case in self.cases],
        }
        (folder / "results.json").write_text(
            json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        picture = self._draw(folder)
        (folder / "report.md").write_text(self.markdown(picture), encoding="utf-8")

    def _draw(self, folder: Path) -> bool:
        try:
            from hvd_ckpt.bench.recompute.picture import draw
        except ImportError as error:
            say_no_pictures(error)
            return False
        draw(folder / PICTURE, self.cases)
        return True

    def markdown(self, picture: bool = False) -> str:
        """The report as a page of Markdown; ``picture``: whether it shows one."""
        lines = ["# Recomputation, measured", ""]
        lines += [f"- {name}: {value}" for name, value in self._beside().items()]
        if picture:
            lines += ["", f"![Time and memory of a step]({PICTURE})"]
        for case in self.cases:
            lines += ["", f"## {_title(case)}", "", *_grid(COLUMNS, contender_rows(case))]
            if case.plans:
                lines += ["", *_grid(PLAN_COLUMNS, plan_rows(case))]
            lines += ["", *(f"- {line}" for line in _remarks(case))]
        lines += ["", "## How to read it", "", *(f"- {line}" for line in NOTES), ""]
        return "\n".join(lines)

    def _beside(self) -> dict[str, str]:
        return {
            **self.facts,
            "rounds": str(self.settings.get("rounds")),
            "took": f"{self.seconds:.0f} s",
            "command": self.command,
        }


def contender_rows(case: Case) -> list[tuple[str, ...]]:
    """One row for each contender; a family of which nothing runs, for one reason, is one row, and the reason a remark."""
    rows: dict[str, tuple[str, ...]] = {}
    for entry in case.entries:
        if not entry.runs:
            name = entry.family if _fails(case, entry) else entry.name
            rows[name] = (name, *"---", "does not run", *"----")
            continue
        plan, limit, verdict = case.answer(entry.name), case.limit(entry), case.verdict(entry)
        rows[entry.name] = (
            *_figures(case, entry),
            "none" if plan is not None and not plan.runs else _mib(plan),
            "-" if plan is None else _spread(plan.ratio(entry)),
            "-" if limit is None else f"<= {limit:.2f}",
            "-" if verdict is None else "yes" if verdict else "no",
        )
    return list(rows.values())


def plan_rows(case: Case) -> list[tuple[str, ...]]:
    """One row for each different plan."""
    rows: list[tuple[str, ...]] = []
    for plan in case.plans:
        names = "; ".join(name for name, answer in case.answers.items() if answer == plan.name)
        if not plan.runs:
            rows.append((plan.name, *"---", "none", *"--", names))
            continue
        seconds = plan.step_seconds()
        rows.append(
            (
                *_figures(case, plan),
                _ratio(plan.peak_bytes, plan.predicted_bytes),
                _ratio(seconds.median if seconds else None, plan.predicted_seconds),
                names,
            )
        )
    return rows


def _fails(case: Case, entry: Entry) -> bool:
    """Whether all of the contender's family have failed, for the same reason."""
    family = [one for one in case.entries if one.family == entry.family]
    return len({one.failure for one in family}) == 1 and not any(one.runs for one in family)


def _figures(case: Case, entry: Entry) -> tuple[str, ...]:
    """What every row begins with."""
    time = "1" if entry.family == KEEP else _spread(case.time_of_keep(entry))
    return entry.name, _mib(entry), _ratio(entry.peak_bytes, case.keep.peak_bytes), time, entry.same


def _remarks(case: Case) -> list[str]:
    """What stands below the tables: the step that all are compared with, the smallest peaks, and who does not run and why."""
    lines = []
    if seconds := case.keep.step_seconds():
        lines.append(
            f"{case.keep.name}: {seconds.median:.2f} s [{seconds.low:.2f}, {seconds.high:.2f}], {_mib(case.keep)} MiB"
        )
    if smallest := case.smallest():
        ours, other, ratio = smallest
        met = "met" if ratio <= WANTED_SMALLEST else "not met"
        lines.append(
            f"smallest peak: ours {_mib(ours)} MiB ({ours.name}), smallest of any contender's {_mib(other)} MiB "
            f"({other.name}), ratio {ratio:.2f}; wanted at most {WANTED_SMALLEST:g}: {met}"
        )
    judged = [verdict for entry in case.entries if (verdict := case.verdict(entry)) is not None]
    if judged:
        lines.append(f"wanted at a contender's own peak: met for {sum(judged)} of {len(judged)}")
    if case.failure:
        lines.append(case.failure)
    failures: dict[str, list[str]] = {}
    for entry in (*case.entries, *case.plans):
        if entry.failure:
            name = entry.family if entry in case.entries and _fails(case, entry) else entry.name
            failures.setdefault(entry.failure, []).append(name)
    lines += [f"{'; '.join(dict.fromkeys(names))}: {why}" for why, names in failures.items()]
    return lines


def _title(case: Case) -> str:
    return f"{case.workload}{', compiled' if case.compiled else ''}. {case.title}"


def _result(case: Case) -> dict[str, Any]:
    """A case for programs: all seconds, and what was made of them."""

    def entry(one: Entry) -> dict[str, Any]:
        ratio, answer = case.time_of_keep(one), case.answer(one.name)
        ours = answer.ratio(one) if answer else None
        return {
            **{
                name: getattr(one, name)
                for name in ("name", "family", "peak_bytes", "same", "right", "seconds", "failure")
            },
            **{name: getattr(one, name) for name in ("budget", "predicted_bytes", "predicted_seconds")},
            "time_of_keep": ratio and dataclasses.asdict(ratio),
            "our_time_of_it": ours and dataclasses.asdict(ours),
            "met": case.verdict(one),
        }

    smallest = case.smallest()
    return {
        "workload": case.workload,
        "title": case.title,
        "compiled": case.compiled,
        "wanted": case.wanted,
        "contenders": [entry(one) for one in case.entries],
        "plans": [entry(one) for one in case.plans],
        "answers": case.answers,
        "smallest_peak_ratio": smallest and smallest[2],
        "failure": case.failure,
    }


def _grid(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _mib(entry: Entry | None) -> str:
    return "-" if entry is None or entry.peak_bytes is None else f"{entry.peak_bytes / MIB:.1f}"


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one is not None and other else "-"


def _spread(ratio: Quartiles | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
