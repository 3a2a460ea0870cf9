"""Cases and columns: everything that was measured under one condition, and the values that a report shows of it.

A :class:`Column` is declared once. With a title it is in the printed table and the Markdown, with a key in ``results.json``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_ckpt.app.compare.runner.report import MIB, Table
from hvd_ckpt.app.compare.runner.stats import Quartiles, quartiles, quartiles_of_ratios, slowest


@dataclass
class Case:
    """One engine under one condition.

    Attributes:
        engine: a name.
        at: the condition: names and values that it shares with the engines that it is compared with, such as workload and np.
        seconds: of a step, in each round.
        figures: everything else that was measured, by name; what :meth:`add` has added, of each rank.
        failure: why something is missing, in one line.
    """

    engine: str
    at: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def add(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Adds what each rank of a job has measured: ``seconds`` of its steps, of which the median counts, and figures by name."""
        if ranks:
            self.seconds.append(statistics.median(slowest(rank["seconds"] for rank in ranks)))
            for name in ranks[0]:
                self.figures[name] = [rank[name] for rank in ranks]

    def figure(self, name: str, over: Callable[[Any], Any] = lambda value: value) -> Any:
        """A figure, or what ``over`` makes of it, such as the largest over the ranks; None where it is missing."""
        return over(self.figures[name]) if name in self.figures else None

    @property
    def step(self) -> Quartiles | None:
        """Seconds of a step over the rounds."""
        return quartiles(self.seconds) if self.seconds else None

    def ratio(self, other: Case | None) -> Quartiles | None:
        """The time of a step as a ratio to another's in the same round, over the rounds."""
        return None if other is None else quartiles_of_ratios(self.seconds, other.seconds)


def find_case(cases: Iterable[Case], engine: str, at: dict[str, Any]) -> Case | None:
    """The case of an engine under a condition."""
    return next((case for case in cases if (case.engine, case.at) == (engine, at)), None)


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
        itself: the engine to which the value is a ratio: its own entry is 1.
        missing: the entry where the value is None.
    """

    title: str
    of: Callable[[Any], Any]
    form: Form = ""
    key: str = ""
    left: bool = False
    itself: str = ""
    missing: str = "-"

    def entry(self, case: Any) -> str:
        """The value of a case as an entry of the table."""
        if self.itself and case.engine == self.itself:
            return "1"
        value = self.of(case)
        if value is None:
            return self.missing
        return self.form(value) if callable(self.form) else f"{value:{self.form}}"


def conditions(*names: str, left: Sequence[str] = ()) -> list[Column]:
    """A column for each of these names in :attr:`Case.at`."""

    def condition(name: str) -> Column:
        return Column(name, lambda case: case.at[name], key=name, left=name in left)

    return [condition(name) for name in names]


def attributes(*names: str) -> list[Column]:
    """These attributes of a case, for programs alone."""

    def attribute(name: str) -> Column:
        return Column("", lambda case: getattr(case, name), key=name)

    return [attribute(name) for name in names]


def figure(
    name: str, over: Callable[[Any], Any] = lambda value: value, title: str = "", form: Form = ""
) -> Column:
    """The column of :meth:`Case.figure`."""
    return Column(title, lambda case: case.figure(name, over), form, key=name)


def table_of(columns: Sequence[Column], cases: Iterable[Any], title: str = "", folded: int = 0) -> Table:
    """The table of all cases."""
    shown = [column for column in columns if column.title]
    rows = [tuple(column.entry(case) for column in shown) for case in cases]
    left = [column.title for column in shown if column.left]
    return Table([column.title for column in shown], rows, title, left, folded)


def results_of(columns: Iterable[Column], cases: Iterable[Any]) -> list[dict[str, Any]]:
    """All values of all cases for programs."""
    return [{column.key: column.of(case) for column in columns if column.key} for case in cases]


def median_in_ms(form: str) -> Callable[[Quartiles], str]:
    """Writes the median of seconds as milliseconds."""
    return lambda seconds: f"{1000 * seconds.median:{form}}"


def quartiles_in_ms(form: str) -> Callable[[Quartiles], str]:
    """Writes quartiles of seconds as milliseconds, all three."""
    return lambda seconds: f"{seconds.times(1000):{form}}"


def in_mib(form: str = ".1f") -> Callable[[float], str]:
    """Writes bytes as MiB."""
    return lambda count: f"{count / MIB:{form}}"


def yes_or_no(value: bool) -> str:
    """Writes a truth."""
    return "yes" if value else "no"
