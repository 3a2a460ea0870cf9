"""A plan as tables for the terminal: the policy of each block, and the cost of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_ckpt.planning.plan import BlockPlan, Cost, Plan

MIB = 1 << 20
COLUMNS = ("block", "policy", "kept MiB", "added ms")
TOTALS = ("", "peak MiB", "of no recomputation", "step ms", "of no recomputation")


def rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Block, policy, MiB kept and ms added; equal blocks in a row share one, with sums.

    Segments of several blocks are numbered (``segment 2``, and ``segment 2.1`` for the first in it).
    """
    alike = itertools.groupby(
        _placed(plan),
        lambda entry: (entry[0], entry[1].policy, entry[1].kept_bytes, entry[1].added_seconds),
    )
    return [_row(segment, [block for _, block in group]) for (segment, *_), group in alike]


def totals(plan: Plan, baseline: Cost | None = None) -> list[tuple[str, ...]]:
    """Costs of a step: with this plan, without recomputation (``baseline``: as measured), of the smallest peak; and the budget."""
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


def print_plan(plan: Plan, console: Console, baseline: Cost | None = None) -> None:
    """Prints both tables."""
    table = _table(COLUMNS)
    for row in rows(plan):
        table.add_row(*map(Text, row))
    console.print(table)
    table = _table(TOTALS)
    for total in totals(plan, baseline):
        table.add_row(*map(Text, total))
    console.print(table)


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        numbers = column not in ("block", "policy", "")
        table.add_column(column, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    return table


def _placed(plan: Plan) -> Iterator[tuple[str, BlockPlan]]:
    """Each block with the number of its segment; an empty one if it is in none."""

    def level(items: tuple[Any, ...], outer: str) -> Iterator[tuple[str, BlockPlan]]:
        segments = itertools.count(1)
        for item in items:
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


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else ""
