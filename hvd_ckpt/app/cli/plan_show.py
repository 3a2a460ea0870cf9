"""Tables of the blocks, costs and stages of a plan, and plots of time against memory and of memory over time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_ckpt.parallel.pipeline.schedule import FORWARD, Span, bubble
from hvd_ckpt.parallel.pipeline.stages import spans_of
from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan, policies_of

MIB = 1 << 20
GIB = 1 << 30
COLUMNS = ("block", "policy", "kept MiB", "added ms")
STAGE_COLUMNS = (
    "stage",
    "blocks",
    "forward ms",
    "backward ms",
    "in flight",
    "states MiB",
    "activations MiB",
    "all MiB",
    "policies",
)
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
    console.print(_table(COLUMNS, rows(plan)))
    console.print(_table(TOTALS, totals(plan, baseline)))
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)


def print_stages(plan: Plan, console: Console) -> None:
    """Prints a table of the pipeline stages of a plan, the share of waiting, and a step of each stage over time."""
    pipeline = plan.pipeline
    assert pipeline is not None
    shown = []
    first = 0
    for number, part in enumerate(pipeline.parts):
        blocks = plan.blocks[first : first + part.blocks]
        first += part.blocks
        name = f"{number % pipeline.stages}" + (
            f" (part {number // pipeline.stages})" if pipeline.virtual_stages > 1 else ""
        )
        whole = ["recomputed as a whole"] if part.recompute else []
        shown.append(
            (
                name,
                blocks[0].name
                if part.blocks == 1
                else f"{blocks[0].name} .. {blocks[-1].name} ({part.blocks})",
                f"{1000 * part.forward_seconds:.1f}",
                f"{1000 * part.backward_seconds:.1f}",
                str(part.in_flight),
                _mib(part.state_bytes),
                _mib(part.activation_bytes),
                _mib(part.memory),
                ", ".join([*whole, policies_of(blocks)]),
            )
        )
    console.print(_table(STAGE_COLUMNS, shown))
    spans = spans_of(pipeline)
    console.print(
        f"One micro-batch takes {1000 * max(part.seconds for part in pipeline.parts):.1f} ms on the longest part. A step of "
        f"{pipeline.micro_batches} micro-batches takes {1000 * max(rank[-1].end for rank in spans):.1f} ms, without the time of "
        f"messages, in which stages wait for {100 * bubble(spans):.0f} % of the time.",
        highlight=False,
    )
    console.print(
        f"Schedule {pipeline.schedule}: micro-batch, - forward, = backward, . waits", highlight=False
    )
    for stage, line in enumerate(schedule_lines(spans, console.width - 10)):
        console.print(f"stage {stage:<3} {line}", highlight=False, markup=False, no_wrap=True)


def schedule_lines(spans: Sequence[Sequence[Span]], width: int) -> list[str]:
    """A line of text for each stage, in which each pass has the length of its time and the number of its micro-batch."""
    last = max(rank[-1].end for rank in spans) or 1.0
    lines = []
    for rank in spans:
        line = ["."] * width
        for span in rank:
            start, end = (round(width * moment / last) for moment in (span.start, span.end))
            label = str(span.action.micro_batch)
            line[start:end] = label.ljust(end - start, "-" if span.action.kind == FORWARD else "=")[
                : end - start
            ]
        lines.append("".join(line))
    return lines


def _table(columns: tuple[str, ...], shown: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        numbers = column not in ("block", "blocks", "policy", "policies", "stage", "")
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in shown:
        table.add_row(*map(Text, row))
    return table


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
    first, last = blocks[0], blocks[-1]
    name = first.name if len(blocks) == 1 else f"{first.name} .. {last.name} ({len(blocks)} blocks)"
    policy = first.policy.title
    return (
        name,
        f"{segment}: {policy}" if segment else policy,
        _mib(sum(block.kept_bytes for block in blocks)),
        f"{1000 * sum(block.added_seconds for block in blocks):.1f}",
    )


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


class _ByteUnit(NamedTuple):
    """Unit of an axis of bytes."""

    size: int
    name: str

    def of(self, count: float) -> float:
        return count / self.size


def frontier_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None) -> None:
    """Plots time against peak memory: the Pareto frontier, the baseline without recomputation, this plan, and its budget.

    Args:
        plan: a plan with a frontier and predicted costs.
        path: path of the PNG.
        baseline: the measured cost without recomputation, or None.
    """
    unit = _unit([plan.baseline.peak_bytes])
    figure, axes = _figure(5.4)
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
    _save(figure, axes, path, 3)


def timeline_plot(plan: Plan, path: str | os.PathLike[str], baseline: Cost | None) -> None:
    """Plots the bytes allocated over one step, without recomputation and with the plan.

    A recorded step takes longer than a normal step, so each curve is scaled to the time of a normal step.

    Args:
        plan: a plan with timelines.
        path: path of the PNG.
        baseline: the measured cost without recomputation, or None.

    Raises:
        ValueError: the plan has no timelines.
    """
    curves = [
        ("no recomputation", BASELINE, plan.timelines.get("before"), (baseline or plan.baseline).seconds),
        ("this plan", OURS, plan.timelines.get("after"), (plan.measured or plan.predicted).seconds),
    ]
    unit = _unit(count for _, _, timeline, _ in curves for _, count in timeline or ())
    figure, axes = _figure(4.6)
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
    _save(figure, axes, path, 2)


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot, which may choose a backend with windows, and keeps each figure until it is closed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, height), layout="constrained")
    FigureCanvasAgg(figure)
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


def _unit(counts: Iterable[int]) -> _ByteUnit:
    most = max(counts, default=0)
    return (
        _ByteUnit(GIB, "GiB")
        if most >= 16 * GIB
        else _ByteUnit(MIB, "MiB")
        if most >= MIB // 2
        else _ByteUnit(1024, "KiB")
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
