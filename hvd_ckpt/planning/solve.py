"""The least time within a memory budget, for a chain of blocks with several ways to run each.

Pure functions on numbers. Two programmes work together:

- :mod:`hvd_ckpt.planning.fronts` makes the choices exactly once it is known which blocks lie in which segment;
  where no blocks join that is all there is to do (a multiple-choice knapsack with a peak at every block);
- :mod:`hvd_ckpt.planning.table` finds the segments of joined blocks on a grid of memory, for all budgets in one
  pass (the dynamic programme of Beaumont et al. 2019 with several choices per block).

Where the grid is exact, so is the result. Where it is not, several nestings around the budget compete, among
them the one of least memory, and every result is simulated: its peak and seconds are those of
:func:`~hvd_ckpt.planning.chain.simulate`, and the peak never exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_ckpt.planning.chain import (
    Block,
    Choice,
    Infeasible,
    Item,
    Run,
    Segment,
    Solution,
    bottleneck,
    simulate,
)
from hvd_ckpt.planning.costs import Costs, Nesting, Seconds
from hvd_ckpt.planning.fronts import Front, front_of
from hvd_ckpt.planning.smallest import smallest_nesting
from hvd_ckpt.planning.table import Table

__all__ = [
    "Block",
    "Choice",
    "Infeasible",
    "Item",
    "Run",
    "Segment",
    "Solution",
    "bottleneck",
    "frontier",
    "simulate",
    "smallest_peak",
    "solve",
]

# Additions of the table that take about half a second, the bytes it may take, and the columns beyond which a
# finer grid no longer shows.
_WORK = 60_000_000
_TABLE_BYTES = 1 << 27
_COLUMNS = (64, 16384)

# Points of a front while nestings compete, and for the one that wins.
_DRAFT = 512
_FINAL = 8192

# A table that is not exact rounds bytes up, so its best nesting for a budget is found some columns above that
# budget: at the last whose nesting fits once its bytes are counted exactly, or within so many of it.
_NEAR = 6

# A table of a frontier serves budgets from its top down to this part of it: below, its grid is too coarse.
_SPAN = 4


def solve(blocks: Sequence[Block], budget: int, *, resolution: int | None = None) -> Solution:
    """The fastest schedule with a peak of at most ``budget`` bytes.

    Args:
        blocks: the chain.
        budget: bytes above the start of the step.
        resolution: cells of the grid of memory for joined blocks; by the length of the chain if None, so that
            a hundred different blocks take about a second.

    Raises:
        Infeasible: if no schedule meets the budget; it says the smallest peak and which block sets it.
        ValueError: for a chain without blocks.
    """
    costs = Costs(blocks)
    fastest = _fastest(costs)
    if fastest.peak <= budget:
        return fastest
    smallest, thrifty = smallest_nesting(costs)
    if budget < smallest:
        items = front_of(costs, thrifty, smallest, _DRAFT).items(0)
        raise Infeasible(budget, smallest, bottleneck(blocks, items))
    drafts = _Drafts(costs, budget)
    drafts.add(_flat(costs))
    drafts.add(thrifty)
    if costs.runs:
        table, exact = _table(costs, budget, resolution)
        low, high = budget // table.cell, table.columns + 1
        if exact:
            drafts.add_column(table, low)
            return drafts.best()
        while high - low > 1:
            middle = (low + high) // 2
            if drafts.add_column(table, middle):
                low = middle
            else:
                high = middle
        for column in range(max(low - _NEAR, 0), min(low + _NEAR, table.columns) + 1):
            drafts.add_column(table, column)
    return drafts.best()


def smallest_peak(blocks: Sequence[Block]) -> Solution:
    """A schedule of the least peak that is possible, exact to the byte, and fast among those.

    Raises:
        ValueError: for a chain without blocks.
    """
    smallest, _ = smallest_nesting(Costs(blocks))
    return solve(blocks, smallest)


def frontier(blocks: Sequence[Block], points: int = 32) -> list[Solution]:
    """Up to ``points`` schedules of which none beats another in both peak and seconds, from that of the least
    peak to the fastest, spread evenly along the curve of seconds over bytes.

    Raises:
        ValueError: for a chain without blocks, or fewer than two points.
    """
    if points < 2:
        raise ValueError(f"a frontier of {points} points: ask for at least 2, the smallest and the fastest")
    costs = Costs(blocks)
    fastest = _fastest(costs)
    smallest, thrifty = smallest_nesting(costs)
    nestings = {_flat(costs): None, thrifty: None}
    top, exact = fastest.peak, not costs.runs
    while top > smallest and not exact:
        table, exact = _table(costs, top, None)
        bottom = smallest if exact else max(smallest, top // _SPAN)
        columns = np.arange(bottom // table.cell, table.columns + 1)
        columns = columns[np.isfinite(table.seconds[columns])]
        if len(columns):
            columns = columns[
                _spread((columns * table.cell).astype(np.float64), table.seconds[columns], points)
            ]
        nestings.update((table.nesting(int(column)), None) for column in columns)
        top = bottom
    size = _FINAL if len(nestings) == 1 else 4 * _DRAFT
    solutions = _read(costs, [front_of(costs, nesting, fastest.peak, size) for nesting in nestings], points)
    if not exact:
        solutions[0] = min(solutions[0], solve(blocks, smallest), key=lambda solution: solution.seconds)
    smallest_first, *rest = solutions
    return [smallest_first, *(solution for solution in rest if solution.seconds < smallest_first.seconds)]


def _fastest(costs: Costs) -> Solution:
    """Every block as fast as it goes: what to do where memory does not matter. No segment is faster."""
    items: list[Item] = []
    for index, block in enumerate(costs.blocks):
        ways = [
            (choice.seconds, choice.kept, choice.backward_peak, choice.forward_peak)
            for choice in block.choices
        ]
        items.append(Run(index, ways.index(min(ways))))
    return _solution(costs, tuple(items))


def _solution(costs: Costs, items: tuple[Item, ...]) -> Solution:
    peak, seconds = simulate(costs.blocks, items)
    return Solution(items, peak, seconds)


def _flat(costs: Costs) -> Nesting:
    """No segments of several blocks."""
    return tuple(range(len(costs.blocks)))


def _table(costs: Costs, budget: int, resolution: int | None) -> tuple[Table, bool]:
    """A table up to ``budget`` if its grid can be exact, else to some way above; and whether it is exact."""
    rows = sum(
        sum(length for length, _ in {(length, number) for row in run for length, number in enumerate(row)})
        for run in costs.windows
    )
    levels = sum((last + 1 - first) ** 2 for first, last in costs.runs)
    columns = resolution or min(
        max(_WORK // max(rows, 1), _COLUMNS[0]), _TABLE_BYTES // (8 * levels), _COLUMNS[1]
    )
    columns = max(columns, _COLUMNS[0])
    unit = _unit(costs)
    if budget // unit <= columns:
        return Table(costs, unit, budget // unit), True
    # Rounding up costs half a cell per item on average: at most this much of the budget.
    top = budget + math.ceil(budget * min(0.5, len(costs.blocks) / (2 * columns)))
    cell = -(-top // (columns * unit)) * unit
    return Table(costs, cell, top // cell), False


def _unit(costs: Costs) -> int:
    """The largest number that divides all bytes."""
    sizes = [size for block in costs.blocks for size in (block.output, block.forward_working)]
    for block in costs.blocks:
        for choice in block.choices:
            sizes += [choice.kept, choice.forward_peak, choice.backward_peak]
    return math.gcd(*sizes) or 1


class _Drafts:
    """Nestings compete for a budget by the seconds of their best choices within it."""

    def __init__(self, costs: Costs, budget: int) -> None:
        self.costs = costs
        self.budget = budget
        self._seconds: dict[Nesting, float] = {}  # infinite where the nesting does not fit

    def add(self, nesting: Nesting) -> bool:
        """Whether the nesting fits."""
        if nesting not in self._seconds:
            front = front_of(self.costs, nesting, self.budget, _DRAFT)
            self._seconds[nesting] = float(front.seconds[-1]) if len(front.seconds) else math.inf
        return math.isfinite(self._seconds[nesting])

    def add_column(self, table: Table, column: int) -> bool:
        """Whether the nesting of that column fits; one that the table has none for yet is below the budget."""
        return not math.isfinite(table.seconds[column]) or self.add(table.nesting(column))

    def best(self) -> Solution:
        nesting = min(self._seconds, key=self._seconds.__getitem__)
        return _solution(self.costs, front_of(self.costs, nesting, self.budget, _FINAL).items(-1))


def _read(costs: Costs, fronts: Sequence[Front], points: int) -> list[Solution]:
    """Solutions spread over the best of all fronts."""
    need = np.concatenate([front.need for front in fronts])
    seconds = np.concatenate([front.seconds for front in fronts])
    owner = np.concatenate([np.full(len(front.need), number) for number, front in enumerate(fronts)])
    place = np.concatenate([np.arange(len(front.need)) for front in fronts])
    order = np.lexsort((seconds, need))
    best = np.minimum.accumulate(seconds[order])
    order = order[np.flatnonzero(np.concatenate(([True], seconds[order][1:] < best[:-1])))]
    order = order[_spread(need[order].astype(np.float64), seconds[order], points)]
    found: list[Solution] = []
    for index in order:
        solution = _solution(costs, fronts[owner[index]].items(int(place[index])))
        # Summed in another order, two times that differed may be equal.
        if not found or solution.seconds < found[-1].seconds:
            found.append(solution)
    return found


def _spread(need: Seconds, seconds: Seconds, points: int) -> list[int]:
    """Indices of up to ``points`` points of a falling curve, its ends included, evenly along its length in the
    square that it spans. Seconds are taken by their logarithm: the last bytes that recomputing saves can cost
    many times the rest, and would take all the points."""
    if len(need) <= points:
        return list(range(len(need)))
    times = np.log(np.maximum(seconds, 1e-12))
    across = np.abs(np.diff(need)) / max(float(np.ptp(need)), 1e-30)
    down = np.abs(np.diff(times)) / max(float(np.ptp(times)), 1e-30)
    length = np.concatenate(([0.0], np.cumsum(np.hypot(across, down))))
    wanted = np.searchsorted(length, np.linspace(0.0, length[-1], points))
    return sorted({0, *(int(index) for index in wanted[1:-1]), len(need) - 1})
