"""The pictures of a comparison: which engine is right where, losses that leave the reference's, step time and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hvd_ckpt.app.compare.runner.report import MIB, save_figure
from hvd_ckpt.app.compare.verdict import Result, by_variant, engines_of, recomputed, short_name, worst

COLORS = {
    "right": "#4daf6e",
    "loose": "#f2d45c",
    "wrong": "#f08a4b",
    "error": "#c8505a",
    "hang": "#3b3b3b",
}
MEANINGS = {"loose": "loose: right, but reduced more than once, or in another order each time"}
LINES = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#7b5ea7", "#8d6a4f", "#5c677d")
VISIBLE = 1e-3  # a difference of losses, as a share, that a line shows


def draw_all(
    folder: Path,
    results: Sequence[Result],
    large: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    title: str,
) -> list[str]:
    """Draws every picture that has something to show; returns the file names."""
    figures = {"verdicts.png": _verdicts(results, title)}
    apart = _leaving_the_reference(large, workloads)
    if apart:
        figures["losses.png"] = _losses(apart, large, workloads, title)
    if large:
        figures["price.png"] = _price(large, title)
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


def _leaving_the_reference(
    results: Sequence[Result], workloads: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str, int]]:
    """Workload, variant and largest number of segments where the loss of some engine visibly differs from one process's."""
    largest: dict[tuple[str, str], int] = {}
    for result in results:
        losses = workloads[result.workload]["losses"]
        if any(abs(loss - other) > VISIBLE * abs(other) for loss, other in zip(result.losses, losses)):
            key = (result.workload, result.variant)
            largest[key] = max(largest.get(key, 0), result.chunks)
    return [(*key, chunks) for key, chunks in largest.items()]


def _losses(
    cells: Sequence[tuple[str, str, int]],
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    title: str,
) -> Figure:
    """A panel for each cell; engines with the same losses share a line."""
    figure = Figure(figsize=(6.4 * len(cells), 4.4), layout="constrained")
    for axes, cell in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells):
        workload, variant, chunks = cell
        losses = workloads[workload]["losses"]
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color="black", linewidth=6, alpha=0.2, label="one process (reference)")
        alike: dict[tuple[str, ...], list[Result]] = {}
        for result in results:
            if (result.workload, result.variant, result.chunks) == cell and result.losses:
                alike.setdefault(tuple(f"{loss:.3g}" for loss in result.losses), []).append(result)
        for color, group in zip(LINES, alike.values()):
            label = ", ".join(short_name(result.engine) for result in group)
            axes.plot(steps, group[0].losses, marker="o", linewidth=1.2, color=color, label=label)
        axes.set_title(f"{workload}, {variant}" + (f", {chunks} segments" if chunks else ""), fontsize=10)
        axes.set(xlabel="step", ylabel="loss, mean of the ranks (axis does not begin at 0)", xticks=steps)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"Losses that differ from one process's; {title}", fontsize=11)
    return figure


def _price(results: Sequence[Result], title: str) -> Figure:
    """Bars of step time and peak memory, without recomputation and with each variant's largest number of segments.

    An engine whose result is not right has a word in place of its bar.
    """
    engines = engines_of(results)
    names = list(dict.fromkeys(result.workload for result in results))
    figure = Figure(figsize=(12, 3.2 * len(names)), layout="constrained")
    for (time, memory), name in zip(figure.subplots(len(names), 2, squeeze=False), names):
        mine = [result for result in results if result.workload == name]
        largest = {
            result.variant: max(same.chunks for same in mine if same.variant == result.variant)
            for result in mine
        }
        shown = [result for result in mine if result.chunks == largest[result.variant]]
        _bars(time, shown, engines, lambda result: result.ratio)
        time.axhline(1, color="black", linewidth=0.8, linestyle="--")
        time.set_ylabel("step time / Horovod's without recomputation", fontsize=8)
        _bars(memory, shown, engines, lambda result: result.peak_bytes and result.peak_bytes / MIB)
        memory.set_ylabel("peak memory, MiB", fontsize=8)
        for axes in (time, memory):
            axes.set_title(name, fontsize=10)
    patches = [Patch(color=LINES[i % len(LINES)], label=short_name(name)) for i, name in enumerate(engines)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)
    figure.suptitle(f"Step time and peak memory; {title}", fontsize=11)
    return figure


def _bars(
    axes: Axes,
    results: Sequence[Result],
    engines: Sequence[str],
    value_of: Callable[[Result], float | None],
) -> None:
    cells = list(dict.fromkeys(recomputed(result) for result in results))
    width = 0.8 / len(engines)
    for result in results:
        index, value = engines.index(result.engine), value_of(result)
        x = cells.index(recomputed(result)) + (index - (len(engines) - 1) / 2) * width
        if result.status not in ("right", "loose"):
            grey: dict[str, Any] = {"fontsize": 7, "color": "#666666"}
            axes.text(x, 0, f" {result.status}", rotation=90, ha="center", va="bottom", **grey)
        elif value is not None:
            axes.bar(x, value, width, color=LINES[index % len(LINES)], edgecolor="white", linewidth=0.3)
    labels = [cell.replace(" x", "\n") + " segments" * (" x" in cell) for cell in cells]
    labels = ["no\nrecomputation" if label == "none" else label for label in labels]
    axes.set_xticks(range(len(cells)), labels, fontsize=8)
    axes.set(xlim=(-0.5, len(cells) - 0.5), ylim=(0, None))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
