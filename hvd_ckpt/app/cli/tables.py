"""Tables in the terminal and on pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import rich.table
from rich.box import SIMPLE_HEAD
from rich.text import Text


@dataclass
class Table:
    """Rows of text under column titles.

    Attributes:
        words: columns of words, which are on the left and may be folded; by default those in which no entry begins with a number.
        folded: number of leading columns whose entry is not repeated in the terminal while it stays the same; a change in the first
            column begins a section.
        style: the rich style of an entry in the terminal.
        mark: the entry as Markdown.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]] = ()
    title: str = ""
    words: Sequence[str] | None = None
    folded: int = 0
    style: Callable[[str], str] = lambda entry: ""
    mark: Callable[[str], str] = lambda entry: entry

    def for_terminal(self) -> rich.table.Table:
        """The table as rich prints it."""
        table = rich.table.Table(
            title=self.title or None,
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for number, name in enumerate(self.columns):
            # Numbers may have quartiles, or stand in parentheses.
            words = not any(row[number].lstrip("(-")[:1].isdigit() for row in self.rows if number < len(row))
            words = words if self.words is None else name in self.words
            if words:
                table.add_column(name, overflow="fold")
            else:  # of a number that is cut, an ellipsis tells
                table.add_column(name, justify="right", no_wrap=True)
        before: tuple[str, ...] = ()
        for row in self.rows:
            same = 0
            while same < self.folded and before and row[same] == before[same]:
                same += 1
            if self.folded and before and same == 0:
                table.add_section()
            table.add_row(*(Text(entry, self.style(entry)) for entry in ("",) * same + row[same:]))
            before = row
        return table

    def markdown(self) -> list[str]:
        """The table as lines of Markdown."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(map(self.mark, row)) + " |" for row in self.rows]
        return [f"## {self.title}", "", *lines] if self.title else lines
