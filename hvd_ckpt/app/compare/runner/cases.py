"""Columns: the values that a report shows of each case.

A :class:`Column` is declared once. With a title it is in the printed table and the Markdown, with a key in ``results.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ckpt.app.compare.runner.report import MIB, Table
from hvd_ckpt.app.compare.runner.stats import Quartiles

Form = str | Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A value of each case.

    Attributes:
        title: in tables; empty for a value of ``results.json`` alone.
        of: takes a case to the value, None where it is missing.
        form: the format of an entry, or a function that writes it.
        key: in ``results.json``; empty for a value of tables alone.
        left: aligned left.
        missing: the entry where the value is None.
    """

    title: str
    of: Callable[[Any], Any]
    form: Form = ""
    key: str = ""
    left: bool = False
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
    left = [column.title for column in shown if column.left]
    return Table([column.title for column in shown], rows, title, left, folded)


def results_of(columns: Iterable[Column], cases: Iterable[Any]) -> list[dict[str, Any]]:
    """All values of all cases for programs."""
    return [{column.key: column.of(case) for column in columns if column.key} for case in cases]


def quartiles_in_ms(form: str) -> Callable[[Quartiles], str]:
    """Writes quartiles of seconds as milliseconds, all three."""
    return lambda seconds: f"{seconds.times(1000):{form}}"


def in_mib(form: str = ".1f") -> Callable[[float], str]:
    """Writes bytes as MiB."""
    return lambda count: f"{count / MIB:{form}}"


def yes_or_no(value: bool) -> str:
    """Writes a truth."""
    return "yes" if value else "no"
