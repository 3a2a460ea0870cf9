"""The tables of a report, for the terminal and for Markdown: who is right where, what it costs, and every cell.

The first two have a column for each engine; the number of segments is folded into one entry as long as the verdict is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from hvd_ckpt.bench.compare.verdict import Result

__all__ = [
    "SEVERITY", "markdown_details", "markdown_matrix", "markdown_price", "recomputed", "short_name", "terminal_matrix",
    "terminal_price", "worst",
]  # fmt: skip

SEVERITY = ("right", "loose", "wrong", "error", "hang")
STYLES = {"right": "green", "loose": "yellow", "absent": "dim", "-": "dim"}
DETAILS = (
    "workload", "recomputed", "engine", "verdict", "ranks", "weights", "buffers", "runs", "reduced", "order", "step ms",
    "ratio", "peak MiB",
)  # fmt: skip
MIB = 1 << 20


def recomputed(result: Result) -> str:
    """The variant and the number of segments, such as ``reentrant x4``."""
    return result.variant if not result.chunks else f"{result.variant} x{result.chunks}"


def short_name(engine: str) -> str:
    """An engine's name without the module it comes from."""
    return engine.rpartition(":")[2]


def worst(results: Iterable[Result]) -> str:
    """The worst verdict among results."""
    return max((result.status for result in results), key=SEVERITY.index)


def terminal_matrix(title: str, results: Sequence[Result], absent: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    header, rows = _matrix(results, absent)
    for name in header:
        table.add_column(name, no_wrap=True)
    before = ""
    for row in rows:
        name = row[0] if row[0] != before else ""
        if name and before and row[1] == "none":
            table.add_section()
        before = row[0]
        entries = [Text(entry, STYLES.get(entry.split()[0], "red")) for entry in row[2:]]
        table.add_row(name, row[1], *entries)
    return table


def terminal_price(results: Sequence[Result]) -> Table:
    table = Table(
        title="step time (ratio to Horovod without recomputation) and peak MiB; in parentheses where wrong",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    header, rows = _price(results)
    for name in header:
        table.add_column(name, no_wrap=True, justify="left" if name in header[:2] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_matrix(results: Sequence[Result], absent: Mapping[str, str]) -> list[str]:
    header, rows = _matrix(results, absent)
    bold = [
        [*row[:2], *(e if e.startswith(("right", "absent", "-")) else f"**{e}**" for e in row[2:])]
        for row in rows
    ]
    return _markdown(header, bold)


def markdown_price(results: Sequence[Result]) -> list[str]:
    return _markdown(*_price(results))


def markdown_details(results: Sequence[Result]) -> list[str]:
    return _markdown(DETAILS, [_details(result) for result in results])


def _engines(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.engine for result in results))


def _matrix(results: Sequence[Result], absent: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    engines = _engines(results)
    header = ["", "recomputed", *(short_name(engine) for engine in engines), *map(short_name, absent)]
    groups: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        row = groups.setdefault((result.workload, result.variant), {})
        row.setdefault(result.engine, []).append(result)
    rows = [
        [
            workload,
            variant,
            *(_verdict(row.get(engine, [])) for engine in engines),
            *("absent" for _ in absent),
        ]
        for (workload, variant), row in groups.items()
    ]
    return header, rows


def _verdict(results: Sequence[Result]) -> str:
    """The worst verdict of some numbers of segments; with those it holds for, if it does not hold for all."""
    if not results:
        return "-"
    status = worst(results)
    where = [str(result.chunks) for result in results if result.status == status]
    return status if len(where) == len(results) else f"{status} x{','.join(where)}"


def _price(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    engines = _engines(results)
    cells: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        cells.setdefault((result.workload, recomputed(result)), {})[result.engine] = result
    rows = [
        [workload, how, *(_cost(row[engine]) if engine in row else "-" for engine in engines)]
        for (workload, how), row in cells.items()
    ]
    return ["", "recomputed", *(short_name(engine) for engine in engines)], rows


def _cost(result: Result) -> str:
    if result.status in ("error", "hang"):
        return result.status
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    peak = "-" if result.peak_bytes is None else f"{result.peak_bytes / MIB:.1f}"
    return f"({ratio}, {peak})" if result.status == "wrong" else f"{ratio}, {peak}"


def _details(result: Result) -> list[str]:
    reduced = "-"
    if result.most is not None:
        few = result.least if result.least is not None else result.most
        reduced = str(result.most) if few == result.most else f"{few}-{result.most}"
    return [
        result.workload,
        recomputed(result),
        short_name(result.engine),
        result.status if result.right else result.status.upper(),
        _told(result.ranks_equal, "equal", "DIFFER"),
        _distance(result.difference, result.weights_right),
        _distance(result.buffer_difference, result.buffers_right),
        _told(result.repeatable, f"{result.runs} equal", f"{result.runs} DIFFER"),
        reduced,
        _told(result.same_order, "same", "VARIES"),
        "-" if result.step_seconds is None else f"{1000 * result.step_seconds:.1f}",
        "-" if result.ratio is None else f"{result.ratio:.2f}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / MIB:.2f}",
    ]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _told(value: bool | None, yes: str, no: str) -> str:
    return "-" if value is None else yes if value else no


def _distance(difference: float | None, right: bool | None) -> str:
    if difference is None:
        return "-"
    if difference == 0:
        return "exact"
    return f"{difference:.1e}" if right else f"OFF {difference:.0e}"
