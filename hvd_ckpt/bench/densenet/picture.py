"""The picture of a report: peak memory and time of each contender over batch sizes, a row of plots for each number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from hvd_ckpt.bench.densenet.case import WANTED_TIME, Case
from hvd_ckpt.bench.densenet.contenders import NAIVE, OFFICIAL, OURS
from hvd_ckpt.bench.densenet.job import Entry

__all__ = ["draw"]

MIB = 1 << 20
COLORS = {
    NAIVE: ("#333333",),
    OFFICIAL: ("#d1495b", "#edae49", "#8d6a4f"),
    OURS: ("#1b6ca8", "#66a182", "#7b5ea7", "#5c677d"),
}
DASHES = {NAIVE: "-", OFFICIAL: "--", OURS: "-"}


def draw(path: Path, cases: Sequence[Case]) -> None:
    """Draw two plots for each number of ranks: MiB over the batch, and time as a ratio to keeping everything over the batch."""
    sizes = list(dict.fromkeys(case.size for case in cases))
    figure = Figure(figsize=(12.8, 4.4 * len(sizes)), layout="constrained")
    for row, size in enumerate(sizes):
        ran = [case for case in cases if case.size == size]
        memory, time = (figure.add_subplot(len(sizes), 2, 2 * row + column) for column in (1, 2))
        _plot(memory, ran, _mebibytes)
        memory.set_ylabel("peak memory of a step, MiB")
        memory.set_yscale("log")
        memory.yaxis.set_major_formatter(LogFormatter())
        memory.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        _plot(time, ran, _time_of_naive)
        time.set_ylabel("time of a step / naive")
        time.axhline(WANTED_TIME, color="#999999", linewidth=0.8, linestyle=":")
        for axes in (memory, time):
            axes.set_title(f"{size} {'rank' if size == 1 else 'ranks'}", fontsize=10)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def _plot(axes: Axes, cases: Sequence[Case], value: Callable[[Case, Entry], float | None]) -> None:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for case in cases:
        for entry in case.entries:
            found = value(case, entry)
            if found is not None:
                name = re.sub(r", \d+ chunks", "", entry.name)  # a line goes on with another number of them
                lines.setdefault((entry.family, name), []).append((case.batch, found))
    used: dict[str, int] = {}
    for (family, name), points in lines.items():
        number = used.setdefault(family, 0)
        used[family] += 1
        color = COLORS[family][number % len(COLORS[family])]
        axes.plot(*zip(*sorted(points)), DASHES[family], marker="o", markersize=4, color=color, label=name)
    batches = sorted({case.batch for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=8)


def _mebibytes(case: Case, entry: Entry) -> float | None:
    return None if entry.peak_bytes is None else entry.peak_bytes / MIB


def _time_of_naive(case: Case, entry: Entry) -> float | None:
    time = case.time(entry)
    return None if time is None else time.median
