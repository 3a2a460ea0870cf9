"""The report: tables in the terminal, ``results.jsonl`` for programs, ``shard.md`` and ``shard.png`` for people."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from hvd_ckpt.bench.harness.stats import Quartiles
from hvd_ckpt.bench.shard.results import MIB, Result, Results
from hvd_ckpt.bench.shard.theory import state_bytes
from hvd_ckpt.install.extras import say_no_pictures
from hvd_ckpt.json_file import write_text

__all__ = ["NOTES", "Report", "Table"]

PICTURE, PAGE, LINES = "shard.png", "shard.md", "results.jsonl"
TIME_COLUMNS = (
    "contender", "recomputed", "step ms", "samples/s", "of the best peer", "counted MiB", "of the model", "sent MiB",
    "loss differs",
)  # fmt: skip
MEMORY_COLUMNS = (
    "contender", "recomputed", "parameters", "gradients", "optimizer state", "on disk", "buffers", "activations", "peak",
    "greatest peak", "resident", "bytes per parameter", "theory", "of theory",
)  # fmt: skip
NOTES = (
    "Everyone trains the same GPT-lite from the same start on the same samples: Adam in float32, micro-batches of one sample. "
    "Steps take turns in the same processes (A B C, then C B A); a step's time is the slowest rank's; median and quartiles "
    "over rounds.",
    "Stages 0 and 1 reduce the sum of all micro-batches once; stages 2 and 3 reduce-scatter after each, so that no rank holds "
    "whole gradients.",
    "of the best peer: time as a ratio to that peer of the same stage and recomputation whose median is least, round by round.",
    "counted MiB: what each rank must send in a step: by this library's own count, and for peers by the collectives of "
    "torch.distributed that they call, each done in the best way: an allreduce of n ranks sends 2 (n - 1) / n of its bytes, "
    "all others (n - 1) / n. of the model: in units of gathering the model once. sent MiB: what the kernel says that the "
    "connections of a rank have delivered; Gloo does a reduce-scatter as an allreduce.",
    "Memory is the heap of the process above that before the model is built, whichever thread or library it is for. parameters, "
    "gradients and optimizer state are tensors that are held when the gradients are ready; activations: the peak of a micro-batch "
    "of the bare model above its parameters and gradients; buffers: the rest up to the peak of a step: buckets, parameters "
    "gathered for a while, copies, and what libraries hold. resident: the most that the resident set grows by, with mapped files.",
    "bytes per parameter: of parameters, gradients and optimizer state in memory, on the rank that holds the most; theory: "
    "Rajbhandari et al. (2020).",
)


@dataclass
class Table:
    """Rows under a title; the first ``labels`` columns are text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    labels: int = 2

    def print(self, console: Console) -> None:
        table = RichTable(
            box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=self.title, title_justify="left"
        )
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="left" if number < self.labels else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> list[str]:
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, *self.rows)]
        return [f"## {self.title}", "", lines[0], "|" + "---|" * len(self.columns), *lines[1:], ""]


@dataclass
class Report:
    """Everything that the benchmark has found out.

    Attributes:
        command: how to repeat it.
        facts: machine, versions, environment.
        settings: what was asked for.
        results: of everyone.
        seconds: how long it took.
    """

    command: str
    facts: dict[str, str]
    settings: dict[str, str]
    results: Results
    seconds: float = 0.0

    def tables(self) -> list[Table]:
        """Time and messages; memory."""
        shown = [one for one in self.results.all if one.ranks]
        return [
            Table("Time and messages", TIME_COLUMNS, [self._time(one) for one in shown]),
            Table("Memory of a rank, MiB", MEMORY_COLUMNS, [self._memory(one) for one in shown]),
        ]

    def _time(self, one: Result) -> tuple[str, ...]:
        results = self.results
        return (
            *_who(one),
            _quartiles(one.step, 1000, 0),
            _number(results.samples_per_second(one), 1),
            _quartiles(results.of_best_rival(one), 1, 2),
            _mebibytes(one.mean("counted")),
            _number(results.model_volumes(one), 2),
            _mebibytes(one.mean("sent")),
            _number(results.loss_difference(one), 1, "e"),
        )

    def _memory(self, one: Result) -> tuple[str, ...]:
        kinds, contender = one.kinds(), one.contender
        states = None if one.states is None else one.states / self.results.elements
        return (
            *_who(one),
            *(_mebibytes(kinds.get(kind)) for kind in ("parameters", "gradients", "state")),
            _mebibytes(one.mean("on_disk") or None),
            *(_mebibytes(kinds.get(kind)) for kind in ("buffers", "activations")),
            *(_mebibytes(value) for value in (one.mean("peak"), one.most("peak"), one.most("resident"))),
            _number(states, 2),
            _number(state_bytes(contender.stage, self.results.size, contender.offload), 2),
            _number(self.results.states_of_theory(one), 3),
        )

    def remarks(self) -> list[str]:
        """What is missing and why, and whether the figures wanted are met."""
        missing = [f"{one.title}: left out: {one.failure}" for one in self.results.all if one.failure]
        if self.results.failure is not None:
            missing.append(f"No times: {self.results.failure}")
        verdicts = self.results.verdicts()
        return missing + [f"{one.what}: {'met' if one.met else 'not met'}" for one in verdicts]

    def print(self, console: Console) -> None:
        """Print the tables and what stands beside them."""
        for table in self.tables():
            table.print(console)
        for line in (*self.remarks(), *(f"{name}: {value}" for name, value in self._beside().items())):
            console.print(line, highlight=False, markup=False)

    def save(self, folder: Path, chart: Path | None = None) -> None:
        """Write everything into ``folder``, over what was there before, and the picture to ``chart``, too."""
        lines = [{**self._beside(), "settings": self.settings}, *map(self._line, self.results.all)]
        write_text("".join(json.dumps(line) + "\n" for line in lines), folder / LINES)
        try:
            from hvd_ckpt.bench.shard.picture import draw

            for path in filter(None, (folder / PICTURE, chart)):
                draw(path, self.results)
        except ImportError as error:
            say_no_pictures(error)
        write_text(self.markdown(picture=(folder / PICTURE).exists()), folder / PAGE)

    def markdown(self, picture: bool = False) -> str:
        """The report as a page of Markdown; ``picture``: whether it shows one."""
        lines = ["# Sharding beside PyTorch's and DeepSpeed's", "", *self.head(), ""]
        if picture:
            lines += [f"![Memory of a rank by kind, and throughput]({PICTURE})", ""]
        for table in self.tables():
            lines += table.markdown()
        return "\n".join([*lines, *(f"- {line}" for line in (*self.remarks(), *NOTES)), ""])

    def head(self) -> list[str]:
        """What stands beside all tables, as a list in Markdown."""
        return [f"- {name}: {value}" for name, value in self._beside().items()]

    def _line(self, one: Result) -> dict[str, Any]:
        ratio = self.results.of_best_rival(one)
        return {
            "contender": one.contender.name,
            **dataclasses.asdict(one.contender),
            "seconds": one.seconds,
            "of_best_peer": ratio and dataclasses.asdict(ratio),
            "states_of_theory": self.results.states_of_theory(one),
            "model_volumes": self.results.model_volumes(one),
            "loss_difference": self.results.loss_difference(one),
            "kinds": one.kinds(),
            "ranks": [dataclasses.asdict(found) for found in one.ranks],
            "failure": one.failure,
        }

    def _beside(self) -> dict[str, str]:
        elements, threads = self.results.elements, self.results.threads
        counted = {"model": f"{elements} parameters", "threads per rank": str(threads)} if elements else {}
        return {
            **self.facts,
            **counted,
            **self.settings,
            "took": f"{self.seconds:.0f} s",
            "command": self.command,
        }


def _who(one: Result) -> tuple[str, str]:
    return one.contender.title, "yes" if one.contender.recompute else "no"


def _number(value: float | None, digits: int, form: str = "f") -> str:
    return "-" if value is None else f"{value:.{digits}{form}}"


def _mebibytes(value: float | None) -> str:
    return _number(None if value is None else value / MIB, 1)


def _quartiles(value: Quartiles | None, factor: float, digits: int) -> str:
    if value is None:
        return "-"
    median, low, high = (f"{one * factor:.{digits}f}" for one in (value.median, value.low, value.high))
    return f"{median} [{low}, {high}]"
