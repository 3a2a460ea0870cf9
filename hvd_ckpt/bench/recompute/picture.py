"""The picture of a report: each workload's contenders and our plans as points of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_ckpt.bench.recompute.case import Case
from hvd_ckpt.bench.recompute.contenders import KEEP, OURS
from hvd_ckpt.bench.recompute.measure import Entry

__all__ = ["draw"]

OUR_COLOR = "#1b6ca8"
STYLES = {
    KEEP: ("*", "#333333"),
    "sequential": ("o", "#d1495b"),
    "blocks": ("s", "#edae49"),
    "selective": ("^", "#66a182"),
    "torch_remat": ("v", "#7b5ea7"),
    "ckptplan": ("P", "#8d6a4f"),
    "rockmate": ("X", "#5c677d"),
    "compiled": ("D", "#d1495b"),
}
COLUMNS = 2


def draw(path: Path, cases: Sequence[Case]) -> None:
    """Draw a plot for each case: peak as a ratio to keeping everything across, time as a ratio to it upwards."""
    rows = -(-len(cases) // COLUMNS)
    figure = Figure(figsize=(6.4 * min(COLUMNS, len(cases)), 4.4 * rows), layout="constrained")
    for number, case in enumerate(cases, start=1):
        _plot(figure.add_subplot(rows, min(COLUMNS, len(cases)), number), case)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def _plot(axes: Axes, case: Case) -> None:
    for family in dict.fromkeys(entry.family for entry in case.entries):
        points = _points(case, [entry for entry in case.entries if entry.family == family])
        marker, color = STYLES.get(family, ("o", "#999999"))
        if points:
            axes.plot(*zip(*points), marker, color=color, label=family, markersize=8 if family == KEEP else 6)
    plans = sorted(_points(case, case.plans))
    if plans:
        axes.plot(*zip(*plans), "-o", color=OUR_COLOR, label=OURS, linewidth=1.2, markersize=4)
    axes.set_title(f"{case.workload}{', compiled' if case.compiled else ''}", fontsize=10)
    axes.set_xlabel("peak memory of a step / keep everything")
    axes.set_ylabel("time of a step / keep everything")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _points(case: Case, entries: Sequence[Entry]) -> list[tuple[float, float]]:
    points = []
    for entry in entries:
        time = case.time_of_keep(entry)
        if entry.right and time is not None and entry.peak_bytes is not None and case.keep.peak_bytes:
            points.append((entry.peak_bytes / case.keep.peak_bytes, time.median))
    return points
