"""The picture of a report: memory of a rank by kind, and throughput, a bar for each contender."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_ckpt.bench.shard.results import MIB, Results

__all__ = ["draw"]

KINDS = {
    "parameters": ("parameters", "#1b6ca8"),
    "gradients": ("gradients", "#66a182"),
    "state": ("optimizer state", "#edae49"),
    "buffers": ("buckets and other buffers", "#b8b8b8"),
    "activations": ("activations", "#d1495b"),
}
OURS, OTHERS = "#1b6ca8", "#9aa5b1"


def draw(path: Path, results: Results) -> None:
    """Draw all contenders that have been measured, stage by stage, this library's first."""
    shown = [one for one in results.all if one.ranks]
    figure = Figure(figsize=(13, 1.6 + 0.3 * len(shown)), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    rows, stage = [], None
    at = 0.0
    for one in shown:
        at += 0.0 if stage in (None, one.contender.stage) else 0.6
        stage = one.contender.stage
        rows.append(at)
        at += 1.0
    left = [0.0] * len(shown)
    for kind, (label, color) in KINDS.items():
        widths = [one.kinds().get(kind, 0.0) / MIB for one in shown]
        memory.barh(rows, widths, left=left, color=color, label=label, height=0.8)
        left = [begun + width for begun, width in zip(left, widths)]
    speeds = [results.samples_per_second(one) or 0.0 for one in shown]
    bars = speed.barh(
        rows, speeds, color=[OURS if one.contender.ours else OTHERS for one in shown], height=0.8
    )
    speed.bar_label(bars, [f"{value:.1f}" for value in speeds], fontsize=7, padding=2)
    memory.set_yticks(rows, [one.title for one in shown], fontsize=8)
    memory.invert_yaxis()
    memory.set_xlabel("peak memory of a rank, MiB")
    speed.set_xlabel(f"samples per second, {results.size} ranks")
    figure.legend(
        *memory.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(KINDS),
        fontsize=8,
        frameon=False,
    )
    speed.margins(x=0.1)
    for axes in (memory, speed):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)
