"""The picture of the rooms, ``docs/rooms.svg``, drawn from the imports of the code.

    python docs/draw_rooms.py            # draw it
    python docs/draw_rooms.py --check    # exit status 1 if it is out of date

The rooms are those of the import contract in ``pyproject.toml``. An arrow leads from a room to one that it imports, and is left
out where a longer way of arrows leads to the same room. Rows follow from the arrows, as in Sugiyama et al., "Methods for Visual
Understanding of Hierarchical System Structures" (1981): each room is below all that import it, and rows are sorted so that
arrows cross seldom.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"
PARTS = ("library", "application")
COLORS = {"library": "#e3f0fb", "application": "#e8f6e3"}

WIDTH, HEIGHT = 128, 36  # of a box
LANE, ROW = 30, 74  # width of a column that only an arrow passes; distance of two rows
TITLE, MARGIN = 110, 12

Graph = dict[str, set[str]]
Place = tuple[float, float]  # center of a box, or of an arrow's way through a row


def rooms() -> list[str]:
    """Rooms as the import contracts list them: ``app.cli``, ``parallel.tensor``, ``snapshots``, ..."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    package, application, extensions = (
        ast.literal_eval(layers)
        for layers in re.findall(r"^layers = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    )
    inner = {"app": application, "parallel": extensions[0].split(" | ")}
    return [f"{outer}.{room}" for outer in inner for room in inner[outer]] + [
        room for room in package if room not in inner and (ROOT / "hvd_ckpt" / room).is_dir()
    ]


def part(room: str) -> str:
    """The part of the code that a room belongs to, one of ``PARTS``."""
    return "application" if room.split(".")[0] == "app" else "library"


def imported(tree: ast.AST) -> Iterator[str]:
    """Names that a file imports, also inside functions, but not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


def imports() -> Graph:
    """The rooms that each room imports."""
    names = rooms()

    def room_of(name: str) -> str | None:
        return next((room for room in names if f"{name}.".startswith(f"hvd_ckpt.{room}.")), None)

    graph: Graph = {room: set() for room in names}
    for path in sorted((ROOT / "hvd_ckpt").rglob("*.py")):
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if room is not None:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            graph[room].update(
                target for name in imported(tree) if (target := room_of(name)) not in (None, room)
            )
    return graph


def without_shortcuts(graph: Graph) -> Graph:
    """The graph without arrows to rooms that a longer way reaches."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*map(below, graph[room]))

    return {
        room: {target for target in graph[room] if not any(target in below(other) for other in graph[room])}
        for room in graph
    }


def rows(graph: Graph) -> dict[str, int]:
    """The row of each room, from 0 at the bottom; those of the application are above the library's."""

    @cache
    def row(room: str) -> int:
        lower_parts = PARTS[: PARTS.index(part(room))]
        under = graph[room].union(other for other in graph if part(other) in lower_parts)
        return 1 + max(map(row, under), default=-1)

    return {room: row(room) for room in graph}


def lay_out(graph: Graph) -> tuple[dict[str, Place], list[list[str]]]:
    """The place of each box and of each arrow in each row that it passes, and the ways of arrows through these places."""
    row_of = rows(graph)
    ways = []
    for room in graph:
        for target in sorted(graph[room]):
            between = [f"{room} > {target}: {row}" for row in range(row_of[room] - 1, row_of[target], -1)]
            row_of |= {name: row_of[room] - 1 - index for index, name in enumerate(between)}
            ways.append([room, *between, target])
    lines: list[list[str]] = [[] for _ in range(max(row_of.values()) + 1)]
    for name, row in row_of.items():
        lines[row].append(name)
    neighbors: dict[str, list[str]] = {
        name: [] for name in row_of
    }  # lists: their sums are the same in each run
    for way in ways:
        for upper, lower in itertools.pairwise(way):
            neighbors[upper].append(lower)
            neighbors[lower].append(upper)

    x: dict[str, float] = {}

    def spread(line: list[str]) -> None:
        widths = [WIDTH + LANE if name in graph else LANE for name in line]
        left = -sum(widths) / 2
        for name, width in zip(line, widths, strict=True):
            x[name] = left + width / 2
            left += width

    for line in lines:
        spread(line)
    for turn in range(24):
        for line in lines if turn % 2 else reversed(lines):
            line.sort(key=lambda name: sum(x[other] for other in neighbors[name]) / len(neighbors[name]))
            spread(line)
    places = {name: (x[name], -row_of[name] * ROW) for name in x}
    return places, ways


def draw() -> str:
    """The picture as the text of an SVG file."""
    graph = without_shortcuts(imports())
    places, ways = lay_out(graph)
    left = min(x for x, _ in places.values()) - WIDTH / 2 - TITLE
    right = max(x for x, _ in places.values()) + WIDTH / 2 + MARGIN
    top = min(y for _, y in places.values()) - ROW / 2
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left:.0f} {top:.0f} {right - left:.0f} {ROW / 2 - top:.0f}" '
        'font-family="sans-serif" font-size="14" text-anchor="middle">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>',
    ]
    for name in PARTS:
        heights = [places[room][1] for room in graph if part(room) == name]
        upper, lower = min(heights) - ROW / 2, max(heights) + ROW / 2
        svg.append(
            f'<rect x="{left:.0f}" y="{upper:.0f}" width="{right - left:.0f}" height="{lower - upper:.0f}" fill="{COLORS[name]}"/>'
        )
        svg.append(f'<text x="{left + TITLE / 2:.0f}" y="{upper + 24:.0f}" font-weight="bold">{name}</text>')
    for way in ways:
        points = [places[name] for name in way]
        start, end = points[0], points[-1]
        points = [(start[0], start[1] + HEIGHT / 2), *points[1:-1], (end[0], end[1] - HEIGHT / 2)]
        path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            middle = (y0 + y1) / 2
            path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
        svg.append(f'<path d="{path}" fill="none" stroke="#666" marker-end="url(#head)"/>')
    for room in graph:
        x, y = places[room]
        box = f'x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5"'
        svg.append(f'<rect {box} fill="white" stroke="#444"/>')
        svg.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{room.replace(".", "/")}</text>')
    return "\n".join([*svg, "</svg>", ""])


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PICTURE.write_text(draw(), encoding="utf-8")
    elif PICTURE.read_text(encoding="utf-8") != draw():
        sys.exit(f"{PICTURE} is out of date: run python docs/draw_rooms.py")
