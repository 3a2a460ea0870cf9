"""The table in the terminal, ``results.json`` for programs and ``report.md`` for people."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.benchmark.densenet.case import WANTED_TIME, Case
from hvd_ckpt.benchmark.densenet.contenders import NAIVE, OURS, WANTED_MEMORY
from hvd_ckpt.benchmark.densenet.job import Entry
from hvd_ckpt.json_file import write_json

__all__ = ["COLUMNS", "PICTURE", "Report"]

MIB = 1 << 20
PICTURE = "densenet.png"
COLUMNS = ("ranks", "batch", "contender", "peak MiB", "of naive", "step s", "of naive", "right")
NOTES = (
    "batch: images of a step over all ranks; peak: exact bytes that one step (zero_grad, forward pass, loss, backward pass, "
    "optimizer.step) has allocated at most above its start, with the gradients of the parameters already there, on the rank that "
    "needs most; step: its seconds on rank 0, which waits for all, median over rounds (rounds alternate: A B C, then C B A).",
    "of naive: as a ratio to the step that keeps everything; for times the median of the ratios within a round, with quartiles "
    "in brackets.",
    "right: whether weights and running statistics are, bit for bit, those of keeping everything after the same steps.",
    "checkpoint in each layer: torch.utils.checkpoint on concatenation, norm, activation and 1x1 convolution of each dense "
    "layer, as in torchvision's memory-efficient DenseNet and in the pytorch-checkpoint project (there reentrant).",
    "checkpoint_sequential: with the number of chunks that is fastest, on a few images, of those within "
    f"{WANTED_MEMORY} of naive's memory.",
    "plan: this library's, for that budget; one for a share of what keeping everything needs is made with at most --plan-images "
    "images, since the peaks of all batches have the same proportions.",
    "Everyone trains with hvd_ckpt's DistributedOptimizer, so nothing but recomputation differs.",
)


@dataclass
class Report:
    """Everything a benchmark found out.

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
        """Whether every case ran, and this library trained right in all of them."""
        return all(case.sound for case in self.cases)

    def print(self, console: Console) -> None:
        """Print the table and what stands beside it."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("contender", "right") else "right")
        for case in self.cases:
            for number, row in enumerate(_rows(case)):
                table.add_row(*(("", "", *row[2:]) if number else row))
            table.add_section()
        console.print(table)
        for line in (*self.remarks(), *(f"{name}: {value}" for name, value in self._beside().items())):
            console.print(line, highlight=False, markup=False)

    def save(self, folder: Path) -> None:
        """Write ``results.json``, ``report.md`` and, with matplotlib, the picture into ``folder``, over those of before."""
        values = {
            **self._beside(),
            "settings": self.settings,
            "results": [_result(case) for case in self.cases],
        }
        write_json(values, folder / "results.json")
        picture = self._draw(folder)
        (folder / "report.md").write_text(self.markdown(picture), encoding="utf-8")

    def _draw(self, folder: Path) -> bool:
        try:
            from hvd_ckpt.benchmark.densenet.picture import draw
        except ImportError:
            return False
        draw(folder / PICTURE, self.cases)
        return True

    def markdown(self, picture: bool = False) -> str:
        """The report as a page of Markdown; ``picture``: whether it shows one."""
        lines = ["# DenseNet with recomputation, measured", ""]
        lines += [f"- {name}: {value}" for name, value in self._beside().items()]
        if picture:
            lines += ["", f"![Memory and time over batch sizes]({PICTURE})"]
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row) + " |" for case in self.cases for row in _rows(case)]
        lines += ["", *(f"- {line}" for line in (*self.remarks(), *NOTES)), ""]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """What is missing in the table and why, and whether the figures wanted are met."""
        lines = [f"{case.title}: {case.note}" for case in self.cases if case.note]
        lines += [
            f"{case.title}, {entry.name}: {entry.failure}"
            for case in self.cases
            for entry in case.entries
            if entry.failure
        ]
        for case in self.cases:
            for entry in case.entries:
                met, time = case.met(entry), case.time(entry)
                if entry.family == OURS and met is not None and time is not None:
                    lines.append(
                        f"{case.title}, {entry.name}: memory {case.memory(entry):.2f} of naive, wanted at most {WANTED_MEMORY}: "
                        f"{_met(met[0])}; time {time.median:.2f}, wanted at most {WANTED_TIME:.2f}: {_met(met[1])}"
                    )
        return lines

    def _beside(self) -> dict[str, str]:
        threads = sorted({(case.size, case.threads) for case in self.cases if case.threads})
        return {
            **self.facts,
            "threads per rank": ", ".join(f"{count} at np={size}" for size, count in threads),
            "rounds": str(self.settings.get("rounds")),
            "took": f"{self.seconds:.0f} s",
            "command": self.command,
        }


def _rows(case: Case) -> list[tuple[str, ...]]:
    return [
        (
            str(case.size),
            str(case.batch),
            entry.name,
            "-" if entry.peak_bytes is None else f"{entry.peak_bytes / MIB:.1f}",
            *_figures(case, entry),
            _right(entry),
        )
        for entry in case.entries
    ]


def _figures(case: Case, entry: Entry) -> tuple[str, str, str]:
    """Memory of naive, seconds, and time of naive."""
    memory, seconds, time = case.memory(entry), case.seconds(entry), case.time(entry)
    if memory is None or seconds is None or time is None:
        return "-", "-", "-"
    spread = "1" if entry.family == NAIVE else f"{time.median:.2f} [{time.low:.2f}, {time.high:.2f}]"
    return f"{memory:.2f}", f"{seconds:.3f}", spread


def _right(entry: Entry) -> str:
    if entry.failure:
        return "does not fit"
    return f"no: {', '.join(entry.differences)}" if entry.differences else "yes"


def _met(yes: bool) -> str:
    return "met" if yes else "not met"


def _result(case: Case) -> dict[str, Any]:
    """A case for programs: all seconds, and what was made of them."""

    def entry(one: Entry) -> dict[str, Any]:
        time, met = case.time(one), case.met(one)
        return {
            **dataclasses.asdict(one),
            "memory_of_naive": case.memory(one),
            "time_of_naive": time and dataclasses.asdict(time),
            "memory_met": met and met[0],
            "time_met": met and met[1],
        }

    return {
        "ranks": case.size,
        "batch": case.batch,
        "threads": case.threads,
        "contenders": [entry(one) for one in case.entries],
        "note": case.note,
        "failed": case.failed,
    }
