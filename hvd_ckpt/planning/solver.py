"""Solver: the fastest schedule of a chain of blocks within a memory budget, for all budgets at once.

One dynamic programme over *levels*, as in Beaumont et al. (2019), "Optimal checkpointing for heterogeneous chains", with several
choices per block. Level (s, t) runs blocks s to t forward and backward while the gradient of the output of block t waits outside.

Each level has a Pareto frontier: the pairs of bytes needed and seconds such that no other schedule of the level needs less and is
faster. Frontiers are exact up to a size that depends on the length of the chain. Beyond that size, they are thinned. This drops
schedules and leaves the others exact: a schedule never needs more than its point says, and the smallest peak and the fastest
schedule are always there. Small chains are never thinned; on others, the result is within 1 % of the best schedule.

Autocast's cache of weights (``casts``) is held until the forward pass ends. The programme counts it as kept, which is too much if
the peak is in the backward pass. So with casts, schedules of the programme are simulated and chosen by the result.

With several micro-batches in flight, as in a pipeline stage, the bytes that the others keep are part of the need. Then there are
no segments. A schedule that needs more than another one at block s and keeps less is dropped there, although it might need less at
an earlier block. On chains with costs like measured ones, the result is within the same 1 %.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_ckpt.planning.chain import MAX_NESTING, Block, Choice, Item, Run, Solution, simulate

Seconds = NDArray[np.float64]
Integers = NDArray[np.int64]

# The recurrence. need(s, t) is the fewest bytes of level (s, t), seconds(s, t) its time; frontiers hold all tradeoffs of the two.
#
#     level (s, t) begins with       need                                            seconds
#
#     a run of block s               max(forward peak of s + waiting gradient,       seconds of the choice
#     under a choice                     backward peak of s,                           + seconds(s + 1, t)
#                                        kept + need(s + 1, t))
#
#     a segment s .. e, e < t        max(first pass of s .. e + waiting gradient,    first pass of s .. e
#                                        output of e + need(e + 1, t),                 + seconds(e + 1, t)
#                                        need(s, e))                                   + seconds(s, e)
#
# The whole chain is the level (0, last) in which no gradient waits. Levels are computed from the last block backward, so that the
# levels on the right exist; the inner level (s, e) is shorter. A segment also holds its frame from its first pass on.

# An example, the chain of three blocks in `chain.simulate`: (need, seconds) of each level.
#
#     level (0, 0), (1, 1)    (6, 3)                            one run: the waiting gradient of 1 byte and 4 kept are less than 6
#     level (0, 1)            (7, 7)                            segment 0, then a run of 1: 6 + the output of 1 byte
#                             (10, 6)                           runs of 0 and 1: 4 kept + 6
#     whole chain             (7, 12) (8, 11) (11, 10) (14, 9)  (0 1) 2 with (10, 11) needs more than (8, 11)

# Limits of the number of points of a frontier. Between them, the number is such that combining frontiers, points times pairs, takes
# this much work: a few seconds for a hundred different blocks that join.
_POINTS = (64, 8192)
_WORK = 4_000_000
_SIMULATED = 1024  # number of schedules that are simulated if the chain holds casts


class Frontier(NamedTuple):
    """The Pareto frontier of a level: points in order of growing ``need`` and falling ``seconds``.

    Attributes:
        need: bytes needed.
        seconds: time.
        kept: bytes held between the forward and the backward pass.
        depth: levels of nested segments.
        first: the start of the schedule: the choice of the first block, or, if negative, minus the length of a segment.
        inside: for a segment, the point of its own level.
        then: the point of the rest of the level.
    """

    need: Integers
    seconds: Seconds
    kept: Integers
    depth: Integers
    first: Integers
    inside: Integers
    then: Integers


_COSTS = ("need", "seconds", "kept", "depth")
_ZERO = np.zeros(1, dtype=np.int64)
_EMPTY = Frontier(_ZERO, np.zeros(1), _ZERO, _ZERO, _ZERO, _ZERO, _ZERO)


class Solver:
    """Solver for one chain.

    Args:
        blocks: the chain.
        in_flight: micro-batches that are held at a time, see :func:`simulate`. With more than one, there are no segments.
        points: about the most points of a frontier.
    """

    def __init__(self, blocks: Sequence[Block], in_flight: int = 1, points: int | None = None) -> None:
        if in_flight > 1:
            blocks = [replace(block, joins_next=False) for block in blocks]
        self.blocks = tuple(blocks)
        self.in_flight = in_flight
        self._choices = [_undominated(block.choices) for block in blocks]
        self._ends = _segment_ends(blocks)
        self._first_pass = [_first_pass(blocks[s : ends.stop]) for s, ends in enumerate(self._ends)]
        self._levels: dict[tuple[int, int], Frontier] = {}
        self._fill_levels()
        # One frontier more than blocks: that of no blocks, behind the last one, which needs nothing.
        self._whole = [_EMPTY] * (len(blocks) + 1)
        size = _size(sum(len(ends) + len(some) for ends, some in zip(self._ends, self._choices)))
        size = min(size, points or size)
        for s in reversed(range(len(blocks))):
            self._whole[s] = self._level(s, len(blocks) - 1, self._whole.__getitem__, 0, size, in_flight)

    @property
    def smallest(self) -> Solution:
        """A schedule with the smallest possible peak, exact to the byte unless the chain holds casts."""
        return self._curve[2](0)

    @property
    def fastest(self) -> Solution:
        """The fastest schedule at any memory."""
        return self._solution(-1)

    def solve(self, budget: int) -> Solution | None:
        """The fastest schedule with a peak of at most ``budget`` bytes above the start of the step, or None."""
        peaks, _, solution = self._curve
        point = int(np.searchsorted(peaks, budget, side="right")) - 1
        return None if point < 0 else solution(point)

    def frontier(self, points: int = 32) -> list[Solution]:
        """Up to ``points`` schedules on the Pareto frontier of peak and seconds, from the smallest peak to the fastest.

        They are spread evenly along the curve of seconds over bytes.
        """
        peaks, seconds, solution = self._curve
        solutions: list[Solution] = []
        for found in map(solution, _spread(peaks, seconds, points)):
            # simulate() sums the seconds in another order, after which two times that differed may be equal.
            if not solutions or found.seconds < solutions[-1].seconds:
                solutions.append(found)
        return solutions

    @functools.cached_property
    def _curve(self) -> tuple[Integers, Seconds, Callable[[int], Solution]]:
        """Peaks and seconds of schedules on a Pareto frontier, from the smallest peak to the fastest, and each by its number."""
        need, seconds = self._whole[0].need, self._whole[0].seconds
        if not any(block.casts or any(choice.casts for choice in block.choices) for block in self.blocks):
            return need, seconds, self._solution
        points = {*range(0, len(need), max(len(need) // _SIMULATED, 1)), len(need) - 1}
        frontier: list[Solution] = []
        for solution in sorted(map(self._solution, points), key=lambda found: (found.peak, found.seconds)):
            if not frontier or solution.seconds < frontier[-1].seconds:
                frontier.append(solution)
        peaks, times = ([getattr(each, name) for each in frontier] for name in ("peak", "seconds"))
        return np.array(peaks), np.array(times), frontier.__getitem__

    def from_block(self, first: int) -> Frontier:
        """The frontier of the chain from block ``first`` on."""
        return self._whole[first]

    def choices(self, first: int, point: int) -> list[int]:
        """The choices of the blocks from ``first`` on at a point of that frontier, for a chain whose blocks do not join."""
        items = self._items(first, len(self.blocks), self._whole.__getitem__, point)
        return [item.choice for item in items if isinstance(item, Run)]

    def _solution(self, point: int) -> Solution:
        items = self._items(0, len(self.blocks), self._whole.__getitem__, point)
        peak, seconds = simulate(self.blocks, items, self.in_flight)
        return Solution(items, peak, seconds)

    def _items(self, s: int, stop: int, level: Callable[[int], Frontier], point: int) -> tuple[Item, ...]:
        """The schedule of a point, where ``level(s)`` is the frontier of blocks s to ``stop - 1``."""
        items: list[Item] = []
        while s < stop:
            frontier = level(s)
            first, inside = int(frontier.first[point]), int(frontier.inside[point])
            if first >= 0:
                items.append(Run(s, first))
            else:
                items.append(self._items(s, s - first, self._level_until(s - first - 1), inside))
            s += 1 if first >= 0 else -first
            point = int(frontier.then[point])
        return tuple(items)

    def _level_until(self, t: int) -> Callable[[int], Frontier]:
        return lambda s: self._levels[s, t] if s <= t else _EMPTY

    def _fill_levels(self) -> None:
        """Computes the levels of segments. Equal stretches of the chain share one frontier."""
        # Two stretches are equal if their parts without the last and without the first block are. So each stretch gets the first
        # equal one as its name, and a model of a hundred equal layers has a hundred different stretches instead of five thousand.
        last = len(self.blocks) - 1
        windows: dict[tuple[int, int], tuple[int, int]] = {}  # for each stretch, the first equal one
        known: dict[object, tuple[int, int]] = {}
        # Falling s and growing t: the parts of a level, and the first level that equals it, are always there before it.
        for s in reversed(range(last)):
            for t in self._ends[s]:
                key: object = (
                    (windows[s, t - 1], windows[s + 1, t])
                    if t > s
                    else replace(self.blocks[s], joins_next=True)
                )
                windows[s, t] = known.setdefault(key, (s, t))
        size = _size(sum(t - s + 1 for (s, t), first in windows.items() if first == (s, t)))
        for (s, t), first in windows.items():
            if first == (s, t):
                waiting = self.blocks[t].output
                self._levels[s, t] = self._level(s, t, self._level_until(t), waiting, size)
            else:
                self._levels[s, t] = self._levels[first]

    def _level(
        self,
        s: int,
        t: int,
        rest: Callable[[int], Frontier],
        waiting: int,
        size: int,
        in_flight: int = 1,
    ) -> Frontier:
        """The frontier of blocks s to t while ``waiting`` bytes of gradient wait; ``rest(e)`` is the frontier of blocks e to t."""
        parts = [
            _run(number, choice, rest(s + 1), waiting, in_flight - 1) for number, choice in self._choices[s]
        ]
        # Ends before t: a segment of all blocks of a level would run them once more and save nothing.
        if ends := self._ends[s][: t - s]:
            parts.append(self._segments(s, ends, rest, waiting))
        return _merged(parts, size)

    def _segments(self, s: int, ends: range, rest: Callable[[int], Frontier], waiting: int) -> Frontier:
        """The points of a level that start with a segment from s to one of ``ends``, the blocks from s on; ``rest(e)`` is the
        frontier of blocks e on."""
        peaks, seconds, casts = (column[: len(ends)] for column in self._first_pass[s])
        frame = self.blocks[s].frame
        inside, inside_row, inside_start = _joined([self._levels[s, e] for e in ends])
        behind, behind_row, behind_start = _joined([rest(e + 1) for e in ends])
        kept = np.array([self.blocks[e].output + frame for e in ends])
        after = np.maximum(behind.need + (kept + casts)[behind_row], (waiting + frame + peaks)[behind_row])
        again = inside.need + frame
        # The need of a combination is the larger need of its two parts. So its points lie at the needs of either part, and at each
        # of them, both parts are their fastest schedules within that need: two sorted lists are merged, and no pairs are formed.
        # All ends are merged at once: a key that is the need plus a multiple of ``apart`` for each end keeps them apart.
        apart = max(int(after.max()), int(again.max())) + 1
        after, again = after + apart * behind_row, again + apart * inside_row
        key = np.sort(np.concatenate((after, again)), kind="stable")
        key = key[key >= np.maximum(after[behind_start], again[inside_start])[key // apart]]
        row, need = np.divmod(key, apart)
        pick = np.searchsorted(again, key, side="right") - 1
        then = np.searchsorted(after, key, side="right") - 1
        total = inside.seconds[pick] + behind.seconds[then] + seconds[row]
        depth = np.maximum(inside.depth[pick] + 1, behind.depth[then])
        # Most points are slower than one of a smaller need, of another end, and are dropped before they cost more.
        best = np.argsort(need, kind="stable")
        best = best[depth[best] < MAX_NESTING]
        best = best[_pareto(need[best], total[best])]
        row, pick, then = row[best], pick[best], then[best]
        return Frontier(
            need[best],
            total[best],
            kept[row] + behind.kept[then],
            depth[best],
            -1 - row,
            pick - inside_start[row],
            then - behind_start[row],
        )


def _joined(frontiers: Sequence[Frontier]) -> tuple[Frontier, Integers, Integers]:
    """The points of several frontiers one after the other, without the starts of their schedules; for each point the number of its
    frontier; and the first point of each frontier."""
    lengths = [len(frontier.need) for frontier in frontiers]
    points = _EMPTY._replace(
        **{name: np.concatenate([getattr(frontier, name) for frontier in frontiers]) for name in _COSTS}
    )
    return points, np.repeat(np.arange(len(frontiers)), lengths), np.cumsum([0, *lengths[:-1]])


def _run(number: int, choice: Choice, rest: Frontier, waiting: int, others: int) -> Frontier:
    """The frontier of a level that starts with a run of a block, beside ``others`` micro-batches in flight."""
    need = max(waiting + max(choice.forward_peak, choice.kept), choice.backward_peak)
    start = 0
    if not others:
        # All points of the rest that fit into the block's own need would make a schedule of that need: the fastest is enough.
        start = max(int(np.searchsorted(rest.need, need - choice.kept - choice.casts, side="right")) - 1, 0)
    then = np.arange(start, len(rest.need))
    kept = rest.kept[start:] + choice.kept
    return Frontier(
        np.maximum(rest.need[start:] + (1 + others) * choice.kept + choice.casts, need + others * kept),
        rest.seconds[start:] + choice.seconds,
        kept,
        rest.depth[start:],
        np.full(len(then), number),
        np.zeros(len(then), dtype=np.int64),
        then,
    )


def _merged(parts: Sequence[Frontier], size: int) -> Frontier:
    """The Pareto frontier of all parts; of many points, about ``size``."""
    columns = [np.concatenate(column) for column in zip(*parts)]
    order = np.argsort(columns[0], kind="stable")  # a merge, since the parts are sorted
    need, seconds = (column[order] for column in columns[:2])
    chosen = _pareto(need, seconds)
    if len(chosen) > size:
        chosen = chosen[_thinned(need[chosen], size)]
    return Frontier(*(column[order[chosen]] for column in columns))


def _pareto(need: Integers, seconds: Seconds) -> Integers:
    """The points that stay of those in order of need: each that is faster than all before it; of several with one need, the last
    one, which is the fastest."""
    best = np.minimum.accumulate(seconds)
    faster: Integers = np.concatenate(([0], np.flatnonzero(seconds[1:] < best[:-1]) + 1))
    chosen: Integers = faster[np.append(need[faster][1:] > need[faster][:-1], True)]
    return chosen


def _thinned(need: Integers, size: int) -> Integers:
    """The first and the last point of each cell of a grid over ``need``, which is finest where ``need`` is small."""
    place = np.sqrt((need - need[0]) / max(int(need[-1] - need[0]), 1))
    cell = (place * (size // 2 - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(cell, prepend=-1))
    ends = np.append(starts[1:] - 1, len(need) - 1)
    return np.union1d(starts, ends)


def _size(pairs: int) -> int:
    """The number of points of a frontier if this number of pairs of frontiers is combined."""
    return min(max(_WORK // max(pairs, 1), _POINTS[0]), _POINTS[1])


def _segment_ends(blocks: Sequence[Block]) -> list[range]:
    """For each block, the blocks at which a segment from it may end: those that it joins, without the last block of the chain,
    whose backward pass follows at once."""
    ends = [range(0)] * len(blocks)
    stop = len(blocks)
    for s in reversed(range(len(blocks))):
        if not blocks[s].joins_next:
            stop = s + 1
        joins = stop > s + 1 or (s > 0 and blocks[s - 1].joins_next)
        ends[s] = range(s, min(stop, len(blocks) - 1)) if joins else range(0)
    return ends


def _first_pass(blocks: Sequence[Block]) -> tuple[Integers, Seconds, Integers]:
    """Peak bytes above the start, seconds, and casts held, of first passes from the first of these blocks to each of them."""
    boundaries = [0, *(block.output for block in blocks)][:-1]
    working = [max(block.forward_working, block.output) for block in blocks]
    casts = np.cumsum([0, *(block.casts for block in blocks)])
    peaks = np.maximum.accumulate(np.array(boundaries) + casts[:-1] + np.array(working, dtype=np.int64))
    return peaks, np.cumsum([block.forward_seconds for block in blocks]), casts[1:]


def _undominated(choices: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """The choices with their numbers, without those that are no better than another choice in any cost."""
    kept: list[tuple[int, Choice]] = []
    for number, choice in sorted(enumerate(choices), key=lambda entry: entry[1].costs):
        costs = choice.costs
        if not any(all(theirs <= ours for theirs, ours in zip(better.costs, costs)) for _, better in kept):
            kept.append((number, choice))
    return kept


def _spread(need: Integers, seconds: Seconds, points: int) -> list[int]:
    """Indices of up to ``points`` points of a falling curve, evenly spread along its length, including both ends.

    The curve is scaled to a square, with logarithms of the seconds: the last bytes that recomputation saves can take many times as
    long as the others, and would get all the points.
    """
    if len(need) <= points:
        return list(range(len(need)))
    times = np.log(np.maximum(seconds, 1e-12))
    across = np.diff(need) / float(np.ptp(need))
    down = np.abs(np.diff(times)) / max(float(np.ptp(times)), 1e-30)
    length = np.concatenate(([0.0], np.cumsum(np.hypot(across, down))))
    places = np.searchsorted(length, np.linspace(0.0, length[-1], points))
    return sorted({0, *(int(index) for index in places[1:-1]), len(need) - 1})
