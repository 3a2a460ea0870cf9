"""The two pictures of a plan: the time that memory costs, and the memory of one step over time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hvd_ckpt.planning.plan import Cost, Plan

MIB = 1 << 20
GIB = 1 << 30
OURS = "#1b6ca8"
BASELINE = "#8a8f98"
LIMIT = "#2e2e2e"


class _Unit(NamedTuple):
    """The unit of an axis of bytes."""

    size: int
    name: str

    def of(self, count: float) -> float:
        return count / self.size


def frontier_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None = None) -> None:
    """Draws time against peak memory: the Pareto frontier, the baseline without recomputation, this plan, and its budget.

    Args:
        plan: with a frontier and predicted costs.
        path: of the PNG.
        baseline: the measured cost without recomputation.
    """
    unit = _unit([plan.baseline.peak_bytes])
    figure = Figure(figsize=(8.2, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points: list[tuple[float, float]] = []

    def put(cost: Cost, marker: str, label: str, size: float, **style: Any) -> None:
        points.append((unit.of(cost.peak_bytes), 1000 * cost.seconds))
        axes.plot(*points[-1], marker, label=label, markersize=size, **style)

    line = [(unit.of(cost.peak_bytes), 1000 * cost.seconds) for cost in sorted(plan.frontier)]
    if line:
        axes.plot(*zip(*line), "-o", color=OURS, markersize=3, linewidth=1.2, label="plans, predicted")
    put(plan.baseline, "*", "no recomputation, predicted", 13, color=BASELINE)
    hollow = {"markerfacecolor": "none", "markeredgecolor": OURS, "markeredgewidth": 2}
    put(plan.predicted, "o", "this plan, predicted", 11, **hollow)
    if baseline is not None:
        put(baseline, "X", "no recomputation, measured", 10, color=BASELINE, markeredgecolor="white")
    if plan.measured is not None:
        put(plan.measured, "X", "this plan, measured", 10, color=OURS, markeredgecolor="white")
    widest = [x for x, _ in points + line]
    if plan.budget is not None:
        widest.append(unit.of(plan.budget))
        axes.axvline(widest[-1], color=LIMIT, linewidth=1, linestyle="--", label="budget")
    axes.set_xlabel(f"peak memory of a step, {unit.name}")
    axes.set_ylabel("time of a step, ms")
    axes.set_xlim(0, 1.08 * max(widest) or 1)
    axes.set_ylim(0, 1.15 * max(y for _, y in points + line) or 1)
    axes.grid(alpha=0.25)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9, frameon=False
    )
    figure.savefig(os.fspath(path), dpi=120)


def timeline_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None = None) -> None:
    """Draws the bytes allocated over one step, without recomputation and with the plan.

    Recording takes longer than a step, so each curve is stretched to the time that a step takes.

    Args:
        plan: with timelines.
        path: of the PNG.
        baseline: the measured cost without recomputation.

    Raises:
        ValueError: the plan has no timelines.
    """
    curves = [
        ("no recomputation", BASELINE, plan.timelines.get("before"), (baseline or plan.baseline).seconds),
        ("this plan", OURS, plan.timelines.get("after"), (plan.measured or plan.predicted).seconds),
    ]
    unit = _unit(count for _, _, timeline, _ in curves for _, count in timeline or ())
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, color, timeline, seconds in curves:
        if timeline:
            stretch = 1000 * seconds / (timeline[-1][0] or 1)
            across = [stretch * moment for moment, _ in timeline]
            counts = [unit.of(count) for _, count in timeline]
            peak = max(counts)
            title = f"{label}: peak {_number(peak)} {unit.name}, {_number(1000 * seconds)} ms"
            axes.fill_between(across, counts, step="post", color=color, alpha=0.35, linewidth=0)
            axes.step(across, counts, where="post", color=color, linewidth=1, label=title)
            axes.plot(across[counts.index(peak)], peak, "o", color=color, markersize=5)
    if not axes.lines:
        raise ValueError("the plan has no timelines: measure it")
    if plan.budget is not None:
        budget = unit.of(plan.budget)
        label = f"budget: {_number(budget)} {unit.name}"
        axes.axhline(budget, color=LIMIT, linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("time since the start of the step, ms")
    axes.set_ylabel(f"memory above the start of the step, {unit.name}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9, frameon=False
    )
    figure.savefig(os.fspath(path), dpi=120)


def _unit(counts: Iterable[int]) -> _Unit:
    most = max(counts, default=0)
    return (
        _Unit(GIB, "GiB")
        if most >= 16 * GIB
        else _Unit(MIB, "MiB")
        if most >= MIB // 2
        else _Unit(1024, "KiB")
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
