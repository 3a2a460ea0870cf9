"""The table in the terminal, ``results.json`` for programs and ``report.md`` for people."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.bench.reduce import Case, Plan, Quartiles
from hvd_ckpt.bench.workloads import WORKLOADS

__all__ = ["BASELINES", "Report"]

BASELINES = ("horovod", "ddp")
MIB = 1 << 20
NOTES = (
    "step ms: median over jobs of a job's median step; a step is over when the slowest rank's is.",
    "of NAME: the step time as a ratio to that engine's job of the same pair (jobs alternate: A B C, then C B A); median "
    "over pairs, quartiles in brackets. Below 1 is faster.",
    "gradients MiB: what the allocator holds after a step beyond parameters and buffers: gradients and the engine's "
    "buckets, not the communication threads' own buffers (such as Horovod's fusion buffer).",
    "Every rank of every engine has the same number of threads, and is started by horovodrun in the same way; stock "
    "Horovod and DDP run with their defaults, this library with those of its init(). DDP's collectives are Gloo's, whatever "
    "the controller that started it.",
)


@dataclass
class Report:
    """Everything a benchmark found out.

    Attributes:
        command: how to repeat it.
        plan: what was asked for.
        facts: machine, versions, and environment variables that change what is measured.
        cases: the results.
        seconds: how long it took.
    """

    command: str
    plan: Plan
    facts: dict[str, str]
    cases: list[Case]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether no engine failed."""
        return not any(case.failures for case in self.cases)

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of the table."""
        return ("workload", "np", "controller", "engine", "step ms", *self._ratio_titles, "gradients MiB")

    @property
    def _ratio_titles(self) -> tuple[str, ...]:
        return tuple(f"of {name}" for name in BASELINES if name in self.plan.engines)

    def rows(self) -> list[tuple[str, ...]]:
        """The table: one row per case and engine."""
        return [self._row(case, engine) for case in self.cases for engine in self.plan.engines]

    def _row(self, case: Case, engine: str) -> tuple[str, ...]:
        time = case.step_seconds(engine)
        held = case.gradient_bytes.get(engine)
        return (
            case.workload,
            str(case.size),
            case.controller,
            engine.rpartition(":")[2],
            "failed" if engine in case.failures else "-" if time is None else f"{1000 * time.median:.1f}",
            *(
                "1" if engine == other else _spread(case.ratio(engine, other))
                for other in BASELINES
                if other in self.plan.engines
            ),
            "-" if held is None else f"{held / MIB:.1f}",
        )

    @property
    def failures(self) -> list[str]:
        """One line for each engine that failed somewhere."""
        lines = [
            f"{engine}, {case.size} ranks over {case.controller}: {why}"
            for case in self.cases
            for engine, why in case.failures.items()
        ]
        return list(dict.fromkeys(lines))  # cases of one job fail together

    def print(self, console: Console) -> None:
        """Print the table, what failed, and what stands beside the numbers."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="left" if number in (0, 2, 3) else "right", no_wrap=True)
        engines = len(self.plan.engines)
        for number, row in enumerate(self.rows()):
            first = number % engines == 0
            if first and number:
                table.add_section()
            table.add_row(*(row if first else ("", "", "", *row[3:])))
        console.print(table)
        for line in self.failures:
            console.print(line, style="red", highlight=False, markup=False)
        for name, value in self._beside().items():
            console.print(f"{name}: {value}", highlight=False, markup=False)

    def _beside(self) -> dict[str, str]:
        threads = sorted({(case.size, case.threads) for case in self.cases if case.threads})
        return {
            **self.facts,
            "threads per rank": ", ".join(f"{count} at np={size}" for size, count in threads),
            "pairs": str(self.plan.pairs),
            "took": f"{self.seconds:.0f} s",
            "command": self.command,
        }

    def save(self, folder: Path) -> None:
        """Write ``results.json`` and ``report.md`` into ``folder``."""
        values: dict[str, Any] = {
            **self._beside(),
            "settings": {**dataclasses.asdict(self.plan), "folder": str(self.plan.folder)},
            "results": [self._result(case, engine) for case in self.cases for engine in self.plan.engines],
        }
        (folder / "results.json").write_text(
            json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def _result(self, case: Case, engine: str) -> dict[str, Any]:
        spreads = {"step_seconds": case.step_seconds(engine)}
        for other in BASELINES:
            if other in self.plan.engines:
                spreads[f"of_{other}"] = case.ratio(engine, other)
        return {
            "workload": case.workload,
            "np": case.size,
            "controller": case.controller,
            "engine": engine,
            "jobs": case.seconds.get(engine, []),
            **{name: spread and dataclasses.asdict(spread) for name, spread in spreads.items()},
            "gradient_bytes": case.gradient_bytes.get(engine),
            "failure": case.failures.get(engine),
        }

    def markdown(self) -> str:
        """The report as a page of Markdown."""
        lines = ["# The reduction, timed", ""]
        lines += [f"- {name}: {value}" for name, value in self._beside().items()]
        lines += [f"- {name}: {WORKLOADS[name].title}" for name in self.plan.workloads]
        lines += ["", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows()]
        lines += ["", *(f"- {line}" for line in (*self.failures, *NOTES)), ""]
        return "\n".join(lines)


def _spread(ratio: Quartiles | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
