"""Pictures of figures that follow a number: lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.case import Row
from hvd_ckpt.app.compare.runner.report import save_figure


class Point(NamedTuple):
    """A value at ``x`` of a line, which is named by its label, in a panel; ``style`` is for matplotlib's ``plot``."""

    panel: str
    line: str
    x: float
    value: float
    style: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Lines:
    """A picture of lines, with one panel beside the other.

    Attributes:
        points: those of a row, of which there are also all others.
        x, y: labels of the axes; numbers of ranks grow by factors of two.
        shared: all panels have one scale.
        log: titles of panels whose scale is logarithmic.
    """

    points: Callable[[Row, Sequence[Row]], Iterable[Point]]
    x: str = "ranks"
    y: str = ""
    shared: bool = True
    log: Sequence[str] = ()

    def draw(self, folder: Path, rows: Sequence[Row]) -> list[str]:
        """Returns the name of the file, or nothing where there is no point."""
        from matplotlib.figure import Figure

        panels: dict[str, dict[str, list[Point]]] = {}
        for point in (point for row in rows for point in self.points(row, rows)):
            panels.setdefault(point.panel, {}).setdefault(point.line, []).append(point)
        if not panels:
            return []
        figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
        found = figure.subplots(1, len(panels), sharey=self.shared, squeeze=False)[0]
        for axes, (title, lines) in zip(found, panels.items()):
            for label, points in lines.items():
                axes.plot(
                    [point.x for point in points],
                    [point.value for point in points],
                    label=label,
                    **points[0].style,
                )
            axes.set(title=title, xlabel=self.x, yscale="log" if title in self.log else "linear")
            if self.x == "ranks":
                axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
        found[0].set_ylabel(self.y)
        found[0].legend(fontsize=8)
        return [save_figure(figure, folder / "picture.png")]
