"""Reports: tables in the terminal, ``report.md`` and ``details.md`` for people, ``results.json`` for programs, pictures, and the
facts of the machine to print beside a measured number.

A :class:`Column` is declared once. With a title it is in the printed table and the Markdown, with a key in ``results.json``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich.console import Console

from hvd_ckpt.app.cli.tables import Table
from hvd_ckpt.utils.extras import installed_version, say_no_pictures
from hvd_ckpt.utils.plain_data import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("torch", "horovod", "transformers")
PREFIXES = ("HOROVOD_", "OMPI_MCA_", "GLOO_")
MIB = 1 << 20


Form = str | Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A value of each case.

    Attributes:
        title: in tables; empty for a value of ``results.json`` alone.
        of: takes a case to the value, None where it is missing.
        form: the format of an entry, or a function that writes it.
        key: in ``results.json``; empty for a value of tables alone.
        missing: the entry where the value is None.
    """

    title: str
    of: Callable[[Any], Any]
    form: Form = ""
    key: str = ""
    missing: str = "-"

    def entry(self, case: Any) -> str:
        """The value of a case as an entry of the table."""
        value = self.of(case)
        if value is None:
            return self.missing
        return self.form(value) if callable(self.form) else f"{value:{self.form}}"


def table_of(columns: Sequence[Column], cases: Iterable[Any], title: str = "", folded: int = 0) -> Table:
    """The table of all cases."""
    shown = [column for column in columns if column.title]
    rows = [tuple(column.entry(case) for column in shown) for case in cases]
    return Table([column.title for column in shown], rows, title, folded=folded)


def in_mib(form: str = ".1f") -> Callable[[float], str]:
    """Writes bytes as MiB."""
    return lambda count: f"{count / MIB:{form}}"


@dataclass
class Report:
    """Everything that a benchmark found.

    Attributes:
        facts: lines ``name: value`` beside the tables: machine, versions, settings.
        tables: in the terminal and on the page.
        results: for programs: dicts, lists, texts, numbers, None and dataclasses.
        remarks: lines below the tables: failures and their reasons, conclusions.
        notes: lines on the page alone: how the columns are to be read.
        details: Markdown of a page of its own, which then has the notes.
        draw: draws pictures into a folder and returns their file names; only called where matplotlib is installed.
        settings: the options, for programs.
        data: further values for programs, beside the results.
        conclusion: the last line in the terminal, the first on the page.
        success: decides the exit status, and the colour of the conclusion.
    """

    title: str
    facts: dict[str, str]
    tables: list[Table]
    results: Any = None
    remarks: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    draw: Callable[[Path], Sequence[str]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    conclusion: str = ""
    success: bool = True

    def print(self, console: Console) -> None:
        """Prints the tables, the remarks and the facts."""
        for table in self.tables:
            console.print(table.for_terminal())
        for line in (*self.remarks, *(f"{name}: {value}" for name, value in self.facts.items())):
            console.print(line, highlight=False, markup=False)
        if self.conclusion:
            color = "green" if self.success else "red"
            console.print(self.conclusion, style=f"bold {color}", highlight=False, markup=False)

    def save(self, folder: Path) -> None:
        """Writes all files of the report into ``folder``, over earlier ones."""
        values = {**self.facts, **self.data, "settings": self.settings, "results": self.results}
        text = to_json(values, indent=2, inf_nan_mode="strings").decode()
        write_text(text + "\n", folder / "results.json")
        page = self.markdown(self._pictures(folder))
        (folder / "report.md").write_text(page, encoding="utf-8")
        if self.details:
            lines = [f"# {self.title}: details", "", *self.details, "", *listed(self.notes)]
            (folder / "details.md").write_text("\n".join(lines), encoding="utf-8")

    def _pictures(self, folder: Path) -> Sequence[str]:
        try:
            return self.draw(folder) if self.draw is not None else ()
        except ImportError as error:
            say_no_pictures(error)
            return ()

    def markdown(self, pictures: Sequence[str] = ()) -> str:
        """The report as a page of Markdown that shows the pictures with these file names."""
        lines = [f"# {self.title}", "", *([self.conclusion, ""] if self.conclusion else [])]
        lines += listed(f"{name}: {value}" for name, value in self.facts.items())
        lines += [f"![{Path(name).stem}]({name})\n" for name in pictures]
        for table in self.tables:
            lines += [*table.markdown(), ""]
        lines += [*listed(self.remarks), *listed(() if self.details else self.notes)]
        if self.details:
            lines.append("Everything in detail: [details.md](details.md)")
        return "\n".join(lines).rstrip("\n") + "\n"


def listed(lines: Iterable[str]) -> list[str]:
    """A list as lines of Markdown."""
    items = [f"- {line}" for line in lines]
    return [*items, ""] if items else []


def save_figure(figure: Figure, file: Path) -> str:
    """Writes a matplotlib figure as PNG; returns the file name."""
    figure.savefig(file, dpi=110, bbox_inches="tight")
    return file.name


def machine_facts() -> dict[str, str]:
    """Machine, versions, and variables that are set for Horovod and Open MPI, as lines for a report."""
    from hvd_ckpt.processes.runtime import allowed_cpus  # which imports PyTorch

    versions = [
        f"Python {platform.python_version()}",
        *(f"{name} {installed_version(name) or 'missing'}" for name in PACKAGES),
    ]
    chosen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and "SECRET" not in name
    ]
    return {
        "machine": f"{platform.system()} {platform.machine()}, {allowed_cpus()} CPUs",
        "versions": ", ".join(versions),
        "environment": " ".join(chosen) or "no HOROVOD_*, OMPI_MCA_* or GLOO_* variables set",
    }
