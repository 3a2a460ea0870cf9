"""Tables of the blocks, costs and stages of a plan, and plots of time against memory and of memory over time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from hvd_ckpt.app.cli.tables import Table
from hvd_ckpt.parallel.pipeline.schedule import bubble
from hvd_ckpt.parallel.pipeline.stages import spans_of
from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan, policies_of

MIB = 1 << 20
GIB = 1 << 30
COLUMNS = ("block", "policy", "kept MiB", "added ms")
STAGE_COLUMNS = (
    "stage", "blocks", "forward ms", "backward ms", "in flight", "states MiB", "activations MiB", "all MiB", "policies",
)  # fmt: skip
WORDS = ("block", "blocks", "policy", "policies", "stage", "")
OURS, BASELINE, LIMIT = "#1b6ca8", "#8a8f98", "#2e2e2e"  # colours
TOTALS = ("", "peak MiB", "of no recomputation", "step ms", "of no recomputation")


def rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Rows of block, policy, MiB kept and ms added. Consecutive equal blocks share a row, with sums.

    Segments of several blocks have numbers (``segment 2``, and ``segment 2.1`` for the first segment in it).
    """
    alike = itertools.groupby(
        _placed(plan),
        lambda entry: (entry[0], entry[1].policy, entry[1].kept_bytes, entry[1].added_seconds),
    )
    return [_row(segment, [block for _, block in group]) for (segment, *_), group in alike]


def totals(plan: Plan, baseline: Cost | None) -> list[tuple[str, ...]]:
    """Rows of the budget and of the costs of a step: this plan, no recomputation (``baseline`` as measured), smallest peak."""
    whole = plan.baseline
    budget = "none: the fastest plan" if plan.budget is None else _mib(plan.budget)
    return [
        ("budget", budget, "" if plan.budget is None else _ratio(plan.budget, whole.peak_bytes), "", ""),
        _total("this plan, predicted", plan.predicted, whole),
        *([_total("this plan, measured", plan.measured, baseline or whole)] if plan.measured else []),
        _total("no recomputation, predicted", whole, whole),
        *([_total("no recomputation, measured", baseline, baseline)] if baseline else []),
        _total("smallest peak, predicted", plan.smallest, whole),
    ]


def print_plan(plan: Plan, console: Console, baseline: Cost | None) -> None:
    """Prints both tables and the notes of a plan."""
    console.print(Table(COLUMNS, rows(plan), words=WORDS).for_terminal())
    console.print(Table(TOTALS, totals(plan, baseline), words=WORDS).for_terminal())
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)


def print_stages(plan: Plan, console: Console) -> None:
    """Prints a table of the pipeline stages of a plan, and the share of waiting."""
    pipeline = plan.pipeline
    assert pipeline is not None
    shown = []
    left = iter(plan.blocks)
    for number, part in enumerate(pipeline.parts):
        blocks = list(itertools.islice(left, part.blocks))
        turn = f" (part {number // pipeline.stages})" if pipeline.virtual_stages > 1 else ""
        whole = ["recomputed as a whole"] if part.recompute else []
        shown.append(
            (
                f"{number % pipeline.stages}{turn}",
                _names(blocks, f"{part.blocks}"),
                f"{1000 * part.forward_seconds:.1f}",
                f"{1000 * part.backward_seconds:.1f}",
                str(part.in_flight),
                _mib(part.state_bytes),
                _mib(part.activation_bytes),
                _mib(part.memory),
                ", ".join([*whole, policies_of(blocks)]),
            )
        )
    console.print(Table(STAGE_COLUMNS, shown, words=WORDS).for_terminal())
    spans = spans_of(pipeline)
    console.print(
        f"One micro-batch takes {1000 * max(part.seconds for part in pipeline.parts):.1f} ms on the longest part. A step of "
        f"{pipeline.micro_batches} micro-batches takes {1000 * max(rank[-1].end for rank in spans):.1f} ms, without the time of "
        f"messages, in which stages wait for {100 * bubble(spans):.0f} % of the time.",
        highlight=False,
    )


def _placed(plan: Plan) -> Iterator[tuple[str, BlockPlan]]:
    """Each block with the number of its segment, which is empty for a block outside of segments."""

    def level(items: tuple[Any, ...], outer: str) -> Iterator[tuple[str, BlockPlan]]:
        segments = itertools.count(1)
        for item in items:
            # A segment of one block has no number: it is one of many such ones, and consecutive ones share a row.
            if isinstance(item, tuple) and len(item) == 1 and not isinstance(item[0], tuple):
                yield f"{outer or 'segment'} alone", plan.blocks[item[0]]
            elif isinstance(item, tuple):
                yield from level(item, f"{outer}.{next(segments)}" if outer else f"segment {next(segments)}")
            else:
                yield outer, plan.blocks[item]

    yield from level(plan.items, "")


def _row(segment: str, blocks: list[BlockPlan]) -> tuple[str, str, str, str]:
    policy = blocks[0].policy.title
    return (
        _names(blocks, f"{len(blocks)} blocks"),
        f"{segment}: {policy}" if segment else policy,
        _mib(sum(block.kept_bytes for block in blocks)),
        f"{1000 * sum(block.added_seconds for block in blocks):.1f}",
    )


def _names(blocks: Sequence[BlockPlan], count: str) -> str:
    return blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} .. {blocks[-1].name} ({count})"


def _total(name: str, cost: Cost, whole: Cost) -> tuple[str, ...]:
    return (
        name,
        _mib(cost.peak_bytes),
        _ratio(cost.peak_bytes, whole.peak_bytes),
        f"{1000 * cost.seconds:.1f}",
        _ratio(cost.seconds, whole.seconds),
    )


def _mib(count: float) -> str:
    return f"{count / MIB:.1f}" if count >= MIB else f"{count / MIB:.2g}"


def _ratio(value: float, whole: float) -> str:
    return f"{value / whole:.2f}" if whole else ""


# ------------------------------------------------------------------------------------ pictures


def frontier_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None) -> None:
    """Plots time against peak memory: the Pareto frontier, the baseline without recomputation, this plan, and its budget.

    Args:
        path: path of the PNG.
        baseline: the measured cost without recomputation, or None.
    """
    size, unit = _unit([plan.baseline.peak_bytes])
    figure, axes = _figure(5.4)
    points: list[tuple[float, float]] = []

    def put(cost: Cost, marker: str, label: str, width: float, **style: Any) -> None:
        points.append((cost.peak_bytes / size, 1000 * cost.seconds))
        axes.plot(*points[-1], marker, label=label, markersize=width, **style)

    line = [(cost.peak_bytes / size, 1000 * cost.seconds) for cost in sorted(plan.frontier)]
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
        widest.append(plan.budget / size)
        axes.axvline(widest[-1], color=LIMIT, linewidth=1, linestyle="--", label="budget")
    axes.set_xlabel(f"peak memory of a step, {unit}")
    axes.set_ylabel("time of a step, ms")
    axes.set_xlim(0, 1.08 * max(widest) or 1)
    axes.set_ylim(0, 1.15 * max(y for _, y in points + line) or 1)
    _save(figure, axes, path, 3)


def timeline_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None) -> None:
    """Plots the bytes allocated over one step, without recomputation and with the plan.

    A recorded step takes longer than a normal step, so each curve is scaled to the time of a normal step.

    Arguments are those of :func:`frontier_plot`. The plan has timelines.
    """
    curves = [
        ("no recomputation", BASELINE, plan.timelines.get("before"), (baseline or plan.baseline).seconds),
        ("this plan", OURS, plan.timelines.get("after"), (plan.measured or plan.predicted).seconds),
    ]
    size, unit = _unit(count for _, _, timeline, _ in curves for _, count in timeline or ())
    figure, axes = _figure(4.6)
    for label, color, timeline, seconds in curves:
        if timeline:
            stretch = 1000 * seconds / (timeline[-1][0] or 1)
            across = [stretch * moment for moment, _ in timeline]
            counts = [count / size for _, count in timeline]
            peak = max(counts)
            title = f"{label}: peak {_number(peak)} {unit}, {_number(1000 * seconds)} ms"
            axes.fill_between(across, counts, step="post", color=color, alpha=0.35, linewidth=0)
            axes.step(across, counts, where="post", color=color, linewidth=1, label=title)
            axes.plot(across[counts.index(peak)], peak, "o", color=color, markersize=5)
    if plan.budget is not None:
        budget = plan.budget / size
        label = f"budget: {_number(budget)} {unit}"
        axes.axhline(budget, color=LIMIT, linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("time since the start of the step, ms")
    axes.set_ylabel(f"memory above the start of the step, {unit}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _save(figure, axes, path, 2)


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot, which may choose a backend with windows, and keeps each figure until it is closed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str | os.PathLike[str], columns: int) -> None:
    axes.grid(alpha=0.25)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(os.fspath(path), dpi=120)


def _unit(counts: Iterable[int]) -> tuple[int, str]:
    most = max(counts, default=0)
    if most >= 16 * GIB:
        return GIB, "GiB"
    return (MIB, "MiB") if most >= MIB // 2 else (1024, "KiB")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
