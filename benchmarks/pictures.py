"""Pictures of rows: bars for measured suites, lines for figures that follow a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.case import Row
from hvd_ckpt.app.compare.runner.report import MIB, Column, save_figure


class Line(NamedTuple):
    """Values by x, and what matplotlib's ``plot`` takes: ``label``, ``color``, ``linestyle``, ..."""

    values: Mapping[Any, float]
    style: Mapping[str, Any]


def draw_lines(
    file: Path,
    panels: Mapping[str, Sequence[Line]],
    x: str,
    y: str = "",
    shared: bool = True,
    doubling: bool = False,
    log: Sequence[str] = (),
) -> list[str]:
    """A panel of lines for each title; returns the name of the file, or nothing where no line has values.

    Args:
        panels: the lines by the titles of their panels.
        x, y: labels of the axes.
        shared: all panels have one scale.
        doubling: x grows by factors of two.
        log: titles of panels whose scale is logarithmic.
    """
    from matplotlib.figure import Figure

    if not any(line.values for lines in panels.values() for line in lines):
        return []
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    found = figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0]
    for axes, (title, lines) in zip(found, panels.items()):
        for line in lines:
            axes.plot([*line.values], [*line.values.values()], **line.style)
        axes.set(title=title, xlabel=x, yscale="log" if title in log else "linear")
        if doubling:
            axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    found[0].set_ylabel(y)
    next(axes for axes, lines in zip(found, panels.values()) if lines).legend(fontsize=8)
    return [save_figure(figure, file)]


def draw_bars(folder: Path, rows: Sequence[Row], conditions: Sequence[Column], peak: str) -> list[str]:
    """The time of each row's step with its quartiles, and its peak where that figure is measured."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.step is not None]
    if not timed:
        return []
    labels = [" ".join([*(column.entry(row) for column in conditions), row.case.engine]) for row in timed]
    engines = list(dict.fromkeys(row.case.engine for row in timed))
    colors = [f"C{engines.index(row.case.engine) % 10}" for row in timed]
    # Of each panel the value of each row, maybe with its quartiles.
    panels = {"ms": [[1000 * value for value in dataclasses.astuple(row.step)] for row in timed if row.step]}
    peaks = [row.over(peak) for row in timed]
    if all(peaks):
        panels["peak MiB"] = [[value / MIB] for value in peaks]
    figure = Figure(figsize=(6 * len(panels), 1.2 + 0.25 * len(timed)), layout="constrained")
    shared = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(shared, panels.items()):
        spread = [[abs(value[0] - value[each]) for value in values] for each in (1, -1) if len(values[0]) > 1]
        axes.barh(range(len(labels)), [value[0] for value in values], xerr=spread or None, color=colors)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlabel(title)
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    return [save_figure(figure, folder / "picture.png")]
