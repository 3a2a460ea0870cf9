"""A benchmark's report that is one table: in the terminal, as ``results.json`` for programs, as ``report.md`` for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.json_file import write_json

__all__ = ["TableReport"]


class _Case(Protocol):
    @property
    def sound(self) -> bool: ...


C = TypeVar("C", bound=_Case)


@dataclass
class TableReport(ABC, Generic[C]):
    """Everything a benchmark found out.

    Attributes:
        command: how to repeat it.
        facts: machine, versions, and environment variables that change what is measured.
        settings: what was asked for.
        cases: the results.
        seconds: how long it took.
    """

    title: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    to_the_left: ClassVar[tuple[str, ...]]
    notes: ClassVar[tuple[str, ...]]

    command: str
    facts: dict[str, str]
    settings: dict[str, Any]
    cases: list[C] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether all cases are."""
        return all(case.sound for case in self.cases)

    @abstractmethod
    def rows(self, case: C) -> Sequence[tuple[str, ...]]:
        """The rows of a case."""

    @abstractmethod
    def result(self, case: C) -> dict[str, Any]:
        """A case for programs."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """Lines under the table: what is missing and why, and whether the figures wanted are met."""

    @abstractmethod
    def told(self) -> dict[str, str]:
        """What readers are to know of the settings."""

    def picture(self, folder: Path) -> str | None:
        """Draws into the folder; a line of Markdown that shows it."""
        return None

    def print(self, console: Console) -> None:
        """Print the table and what stands beside it."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in self.columns:
            table.add_column(name, justify="left" if name in self.to_the_left else "right")
        for case in self.cases:
            for row in self.rows(case):
                table.add_row(*row)
            table.add_section()
        console.print(table)
        for line in (*self.remarks(), *(f"{name}: {value}" for name, value in self._beside().items())):
            console.print(line, highlight=False, markup=False)

    def save(self, folder: Path) -> None:
        """Write ``results.json``, ``report.md`` and a picture, if there is one, into ``folder``, over those of before."""
        results = [self.result(case) for case in self.cases]
        write_json({**self._beside(), "settings": self.settings, "results": results}, folder / "results.json")
        (folder / "report.md").write_text(self.markdown(self.picture(folder)), encoding="utf-8")

    def markdown(self, picture: str | None = None) -> str:
        """The report as a page of Markdown; ``picture``: the line that shows one."""
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self._beside().items()]
        if picture is not None:
            lines += ["", picture]
        lines += ["", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for case in self.cases for row in self.rows(case)]
        lines += ["", *(f"- {line}" for line in (*self.remarks(), *self.notes)), ""]
        return "\n".join(lines)

    def _beside(self) -> dict[str, str]:
        return {**self.facts, **self.told(), "took": f"{self.seconds:.0f} s", "command": self.command}
