"""The plots of a report: who is right where, the losses, and the price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hvd_ckpt.bench.compare.cells import find_variant
from hvd_ckpt.bench.compare.tables import SEVERITY, recomputed, short_name
from hvd_ckpt.bench.compare.verdict import Result

__all__ = ["draw"]

COLORS = {
    "right": "#4daf6e",
    "loose": "#f2d45c",
    "wrong": "#f08a4b",
    "error": "#c8505a",
    "hang": "#3b3b3b",
    "absent": "#e4e4e4",
}
MEANINGS = {"loose": "loose: right, but reduced more than once, or in another order each time"}
LINES = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#7b5ea7", "#8d6a4f", "#5c677d")
MIB = 1 << 20


def draw(
    folder: Path,
    results: Sequence[Result],
    workloads: Mapping[str, Mapping[str, Any]],
    absent: Mapping[str, str],
    settings: Mapping[str, Any],
) -> list[str]:
    """Draw every plot that has something to show; returns the files' names."""
    place = f"{settings['np']} ranks over {settings['controller']}, {settings.get('precision', 'fp32')}"
    large = [result for result in results if not workloads[result.workload].get("small")]
    names = [_save(folder, "verdicts.png", _verdicts(results, absent, place))]
    if large:
        names.append(_save(folder, "losses.png", _losses(large, workloads, place)))
        names.append(_save(folder, "price.png", _price(large, place)))
    return names


def _save(folder: Path, name: str, figure: Figure) -> str:
    FigureCanvasAgg(figure)
    figure.savefig(folder / name, dpi=110, bbox_inches="tight")
    return name


def _engines(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.engine for result in results))


def _verdicts(results: Sequence[Result], absent: Mapping[str, str], place: str) -> Figure:
    """A grid: a column for each engine, a row for each workload and variant, each field cut by number of segments."""
    engines = _engines(results)
    columns = [*engines, *absent]
    rows = list(dict.fromkeys((result.workload, result.variant) for result in results))
    figure = Figure(figsize=(1.9 + 1.25 * len(columns) + 1.6, 1.3 + 0.27 * len(rows)))
    axes = figure.add_subplot()
    for y, (workload, variant) in enumerate(rows):
        for x, engine in enumerate(columns):
            found = [r for r in results if (r.workload, r.variant, r.engine) == (workload, variant, engine)]
            _field(axes, x, y, found if engine in engines else None)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [short_name(name) for name in columns])
    axes.xaxis.tick_top()
    axes.set_yticks(
        [y + 0.5 for y in range(len(rows))],
        [f"{workload}, {variant}" for workload, variant in rows],
        fontsize=8,
    )
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shown = (*SEVERITY, *(["absent"] if absent else []))
    patches = [Patch(color=COLORS[status], label=MEANINGS.get(status, status)) for status in shown]
    axes.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.005), ncols=6, frameon=False, fontsize=8
    )
    axes.set_title(f"Right, or not? {place}; a field is cut by the number of segments", fontsize=10, pad=28)
    return figure


def _field(axes: Axes, x: int, y: int, results: Sequence[Result] | None) -> None:
    """One field of the grid; None is an engine that is absent."""
    if not results:
        color = COLORS["absent"] if results is None else "white"
        axes.add_patch(Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, color=color))
        return
    alike = len({result.status for result in results}) == 1
    shown = results[:1] if alike else results
    width = 0.96 / len(shown)
    for part, result in enumerate(shown):
        left = x + 0.02 + part * width
        axes.add_patch(Rectangle((left, y + 0.06), width * 0.98, 0.88, color=COLORS[result.status]))
        word = result.status if alike else f"x{result.chunks}"
        axes.text(
            left + width / 2,
            y + 0.52,
            word,
            ha="center",
            va="center",
            fontsize=7 if alike else 6,
            color="white" if result.status in ("hang", "error") else "black",
        )


def _losses(results: Sequence[Result], workloads: Mapping[str, Mapping[str, Any]], place: str) -> Figure:
    """For each workload and variant (its largest number of segments) the loss of each engine over the reference's."""
    engines = _engines(results)
    names = list(dict.fromkeys(result.workload for result in results))
    variants = list(dict.fromkeys(result.variant for result in results))
    figure = Figure(figsize=(4.2 * len(variants), 3.1 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(variants), squeeze=False)
    for row, name in zip(panels, names, strict=True):
        losses = workloads[name]["losses"]
        for axes, variant in zip(row, variants, strict=True):
            found = [r for r in results if (r.workload, r.variant) == (name, variant)]
            chunks = max((result.chunks for result in found), default=0)
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, color="black", linewidth=6, alpha=0.2, label="one process")
            for index, engine in enumerate(engines):
                for result in found:
                    if result.engine == engine and result.chunks == chunks and result.losses:
                        style = {"color": LINES[index % len(LINES)], "markersize": 11 - 1.4 * index}
                        label = short_name(engine) + ("" if result.right else f" ({result.status})")
                        axes.plot(
                            steps,
                            result.losses,
                            marker="o",
                            markerfacecolor="none",
                            linewidth=1,
                            label=label,
                            **style,
                        )
            axes.set_title(f"{name}, {variant}" + (f" x{chunks}" if chunks else ""), fontsize=10)
            axes.set_xlabel("step")
            axes.set_ylabel("mean loss of the ranks")
            axes.set_xticks(list(steps))
            axes.grid(alpha=0.25)
            axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"Losses; {place}", fontsize=11)
    return figure


def _price(results: Sequence[Result], place: str) -> Figure:
    """Bars of step time and peak memory; hatched where the result is wrong, missing where there is none."""
    engines = _engines(results)
    names = list(dict.fromkeys(result.workload for result in results))
    figure = Figure(figsize=(15, 3.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 2, squeeze=False)
    for row, name in zip(panels, names, strict=True):
        mine = [result for result in results if result.workload == name]
        cells = list(dict.fromkeys(recomputed(result) for result in mine))
        for axes, what in zip(row, ("ratio", "peak"), strict=True):
            for index, engine in enumerate(engines):
                for result in mine:
                    value = result.ratio if what == "ratio" else result.peak_bytes
                    if result.engine != engine or value is None:
                        continue
                    axes.bar(
                        cells.index(recomputed(result))
                        + (index - (len(engines) - 1) / 2) * 0.8 / len(engines),
                        value if what == "ratio" else value / MIB,
                        0.8 / len(engines),
                        color=LINES[index % len(LINES)],
                        hatch="////" if result.status == "wrong" else None,
                        edgecolor="white",
                        linewidth=0.3,
                    )
            axes.set_xticks(range(len(cells)), [cell.replace(" ", "\n") for cell in cells], fontsize=8)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.25)
            axes.set_axisbelow(True)
            if what == "ratio":
                axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
            axes.set_ylabel(
                "step time / Horovod, nothing recomputed" if what == "ratio" else "peak memory, MiB",
                fontsize=8,
            )
            axes.set_title(f"{name}: {'step time' if what == 'ratio' else 'peak memory'}", fontsize=10)
    patches = [Patch(color=LINES[i % len(LINES)], label=short_name(name)) for i, name in enumerate(engines)]
    patches.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="wrong result"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)
    planned = any(find_variant(result.variant).budget for result in results)
    missing = "an error, a hang or an engine without plans" if planned else "an error or a hang"
    figure.suptitle(
        f"Price; {place}; engines in the order of the legend, a missing bar is {missing}",
        fontsize=11,
    )
    return figure
