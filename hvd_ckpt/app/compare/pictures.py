"""The pictures of a comparison: which engine is right where, and step time and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hvd_ckpt.app.compare.runner.report import MIB, bars, save_figure
from hvd_ckpt.app.compare.verdict import Result, by_variant, engines_of, recomputed, short_name, worst

COLORS = {
    "right": "#4daf6e",
    "loose": "#f2d45c",
    "wrong": "#f08a4b",
    "error": "#c8505a",
    "hang": "#3b3b3b",
}
MEANINGS = {"loose": "loose: right, but reduced more than once, or in another order each time"}


def draw_all(folder: Path, results: Sequence[Result], title: str) -> list[str]:
    """Draws every picture that has something to show; returns the file names."""
    figures = {"verdicts.png": _verdicts(results, title)}
    right = [result for result in results if result.status in ("right", "loose") and result.ratio]
    if right:
        labels = [f"{result.workload}, {recomputed(result)}, {short_name(result.engine)}" for result in right]
        panels = {
            "step time / Horovod's without recomputation": [[result.ratio or 0.0] for result in right],
            "peak memory, MiB": [[(result.peak_bytes or 0) / MIB] for result in right],
        }
        figures["price.png"] = bars(labels, [result.engine for result in right], panels)
    return [save_figure(figure, folder / name) for name, figure in figures.items()]


def _verdicts(results: Sequence[Result], title: str) -> Figure:
    """A column for each engine, a row for each workload and variant; an entry is the worst verdict and its numbers of segments."""
    engines, rows = engines_of(results), by_variant(results)
    figure = Figure(figsize=(3.5 + 1.35 * len(engines), 1.3 + 0.27 * len(rows)))
    axes = figure.add_subplot()
    for y, row in enumerate(rows.values()):
        for x, engine in enumerate(engines):
            if engine in row:
                status, where = worst(row[engine])
                text = f"{status}: {', '.join(where)} segments" if where else status
                color = "white" if status in ("hang", "error") else "black"
                axes.add_patch(Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, color=COLORS[status]))
                axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=7, color=color)
    axes.set(xlim=(0, len(engines)), ylim=(len(rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(engines))], [short_name(name) for name in engines])
    axes.xaxis.tick_top()
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [", ".join(row) for row in rows], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    patches = [Patch(color=color, label=MEANINGS.get(status, status)) for status, color in COLORS.items()]
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.005)}
    axes.legend(handles=patches, ncols=len(patches), frameon=False, fontsize=8, **place)
    axes.set_title(f"Is the training result right? {title}", fontsize=10, pad=28)
    return figure
