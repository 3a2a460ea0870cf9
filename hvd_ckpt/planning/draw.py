"""The two pictures of a plan: which memory costs which time, and the memory of one step over time."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from hvd_ckpt.planning.plan import Cost, Plan

__all__ = ["Curve", "Peer", "frontier_plot", "timeline_plot"]

MIB = 1 << 20
GIB = 1 << 30
OURS = "#1b6ca8"
BEFORE = "#8a8f98"
OTHERS = "#d1495b"
LIMIT = "#2e2e2e"


class Peer(NamedTuple):
    """Another way to run the same step.

    Attributes:
        name: short, it stands beside the point.
        peak_bytes: measured, above the start of the step.
        seconds: of a step.
    """

    name: str
    peak_bytes: int
    seconds: float


class Curve(NamedTuple):
    """Memory of one step over time.

    Attributes:
        timeline: (seconds, bytes above the start of the step), at least one.
        seconds: that a step takes.
        forward_seconds: that its forward pass with the loss takes, if known.
    """

    timeline: Sequence[tuple[float, int]]
    seconds: float
    forward_seconds: float | None = None


class _Unit(NamedTuple):
    """What the axes are in."""

    size: int
    name: str

    def of(self, count: float) -> float:
        return count / self.size


def frontier_plot(
    plan: Plan, path: str | os.PathLike[str], peers: Sequence[Peer] = (), kept: Cost | None = None
) -> None:
    """Draws time against peak memory: the plans that nothing beats, keeping everything, this plan, its budget, and others.

    Args:
        plan: with a frontier and predicted costs.
        path: of the PNG.
        peers: measured points; they and the plan's own measurement should come from one series of steps.
        kept: the measured cost of keeping everything.
    """
    unit = _unit([plan.baseline.peak_bytes, *(peer.peak_bytes for peer in peers)])
    figure = Figure(figsize=(8.2, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points: list[tuple[float, float]] = []

    def put(
        cost: Cost | Peer, marker: str, label: str | None, size: float, **style: Any
    ) -> tuple[float, float]:
        point = unit.of(cost.peak_bytes), 1000 * cost.seconds
        axes.plot(*point, marker, label=label, markersize=size, **style)
        points.append(point)
        return point

    frontier_line = [(unit.of(cost.peak_bytes), 1000 * cost.seconds) for cost in sorted(plan.frontier)]
    if frontier_line:
        axes.plot(
            *zip(*frontier_line), "-o", color=OURS, markersize=3, linewidth=1.2, label="plans, predicted"
        )
        points += frontier_line
    put(plan.baseline, "*", "keep everything, predicted", 13, color=BEFORE)
    put(
        plan.predicted,
        "o",
        "this plan, predicted",
        11,
        markerfacecolor="none",
        markeredgecolor=OURS,
        markeredgewidth=2,
    )
    if kept is not None:
        put(kept, "X", "keep everything, measured", 10, color=BEFORE, markeredgecolor="white")
    if plan.measured is not None:
        put(plan.measured, "X", "this plan, measured", 10, color=OURS, markeredgecolor="white")
    named = [
        (put(peer, "s", "measured, others" if number == 0 else None, 5.5, color=OTHERS), peer.name)
        for number, peer in enumerate(peers)
    ]
    if plan.budget is not None:
        axes.axvline(unit.of(plan.budget), color=LIMIT, linewidth=1, linestyle="--", label="budget")
    axes.set_xlabel(f"peak memory of a step, {unit.name}")
    axes.set_ylabel("time of a step, ms")
    axes.set_xlim(
        0, 1.08 * max([x for x, _ in points] + ([unit.of(plan.budget)] if plan.budget else [])) or 1
    )
    low, high = min(y for _, y in points), max(y for _, y in points)
    room = max(high - low, 0.1 * high) or 1
    axes.set_ylim(max(low - 0.15 * room, 0), high + 0.15 * room)
    axes.grid(alpha=0.25)
    lines = axes.get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.draw_without_rendering()
    _place_names(axes, named, points + _along(frontier_line))
    figure.savefig(os.fspath(path), dpi=120)


def timeline_plot(
    plan: Plan, path: str | os.PathLike[str], curves: Mapping[str, Curve] | None = None
) -> None:
    """Draws the bytes allocated over one step, with everything kept and with the plan.

    Recording takes longer than a step, so each curve is stretched to the time that a step takes.

    Args:
        plan: with timelines, unless there are curves.
        path: of the PNG.
        curves: measured ones, by the names of the plan's timelines, ``"before"`` and ``"after"``.

    Raises:
        ValueError: the plan has no timelines, and there are no curves.
    """
    if curves is None:
        seconds = {"before": plan.baseline.seconds, "after": (plan.measured or plan.predicted).seconds}
        curves = {
            name: Curve(timeline, seconds[name]) for name, timeline in plan.timelines.items() if timeline
        }
    if not curves:
        raise ValueError("the plan has no timelines: measure it")
    unit = _unit([count for curve in curves.values() for _, count in curve.timeline])
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, color in (("before", "keep everything", BEFORE), ("after", "this plan", OURS)):
        if name in curves:
            _fill(axes, curves[name], unit, label, color)
    if plan.budget is not None:
        budget = unit.of(plan.budget)
        label = f"budget: {_number(budget)} {unit.name}"
        axes.axhline(budget, color=LIMIT, linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("time since the start of the step, ms")
    axes.set_ylabel(f"memory above the start of the step, {unit.name}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    lines = axes.get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(os.fspath(path), dpi=120)


def _fill(axes: Axes, curve: Curve, unit: _Unit, label: str, color: str) -> None:
    """One curve; where its forward pass ends, a line goes down and an arrow below says so."""
    stretch = 1000 * curve.seconds / (curve.timeline[-1][0] or 1)
    across = [stretch * moment for moment, _ in curve.timeline]
    counts = [unit.of(count) for _, count in curve.timeline]
    peak = max(counts)
    title = f"{label}: peak {_number(peak)} {unit.name}, {_number(1000 * curve.seconds)} ms"
    axes.fill_between(across, counts, step="post", color=color, alpha=0.35, linewidth=0)
    axes.step(across, counts, where="post", color=color, linewidth=1, label=title)
    axes.plot(across[counts.index(peak)], peak, "o", color=color, markersize=5)
    if curve.forward_seconds is not None:
        end = 1000 * curve.forward_seconds
        height = counts[max(bisect.bisect_right(across, end) - 1, 0)]
        title = f"{label}: backward pass begins, {_number(end)} ms"
        axes.vlines(end, 0, height, color=color, linewidth=1.6, linestyle=":")
        axes.plot(end, 0, "^", color=color, markersize=9, clip_on=False, label=title, zorder=3)


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


def _place_names(
    axes: Axes,
    named: Sequence[tuple[tuple[float, float], str]],
    points: Sequence[tuple[float, float]],
) -> None:
    """Writes each name beside its point, where it covers neither another name nor a point."""
    occupied = [_around(axes, point, 5) for point in points]
    frame = axes.get_window_extent()
    for point, name in named:
        text = axes.annotate(name, point, xytext=(0, 0), textcoords="offset points", fontsize=8, color=OTHERS)
        best: tuple[float, Bbox, tuple[float, float], str] | None = None
        for distance in (7, 16, 28, 42, 58, 76):
            for across, upwards in ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1)):
                align = {1: "left", 0: "center", -1: "right"}[across]
                text.set(ha=align, va={1: "bottom", 0: "center", -1: "top"}[upwards])
                text.xyann = (across * distance, upwards * distance)
                box = text.get_window_extent().padded(1)
                hidden = sum(_shared(box, other) for other in occupied) + 10 * (
                    box.width * box.height - _shared(box, frame)
                )
                if best is None or hidden < best[0] - 1:
                    best = hidden, box, text.xyann, align
        text.remove()
        assert best is not None
        _, box, offset, align = best
        vertical = "center" if offset[1] == 0 else "bottom" if offset[1] > 0 else "top"
        far = max(abs(offset[0]), abs(offset[1])) > 10
        arrow = (
            {"arrowstyle": "-", "color": OTHERS, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
            if far
            else None
        )
        axes.annotate(
            name,
            point,
            xytext=offset,
            textcoords="offset points",
            fontsize=8,
            color=OTHERS,
            ha=align,
            va=vertical,
            arrowprops=arrow,
        )
        occupied.append(box)


def _along(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points close to each other on a line."""
    return [
        (x + part / 8 * (to_x - x), y + part / 8 * (to_y - y))
        for (x, y), (to_x, to_y) in itertools.pairwise(line)
        for part in range(8)
    ]


def _around(axes: Axes, point: tuple[float, float], reach: float) -> Bbox:
    x, y = (float(value) for value in axes.transData.transform(point))
    return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)


def _shared(one: Bbox, other: Bbox) -> float:
    """The area that lies in both, in square pixels."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height
