"""The best choices inside given segments, for all budgets at once.

A :class:`Front` lists, for a stretch of a level and everything after it, the pairs of bytes needed and seconds
that no other choice beats in both. It is built from the back of the level: one more item in front turns bytes
``need`` into ``max(its own need, what it holds + need)``, with no rounding. So the front is exact until it
grows past ``size`` points; then it is thinned to that many, of which each is still exact, and a schedule read
from it never needs more than it says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_ckpt.planning.chain import Item, Segment
from hvd_ckpt.planning.costs import Bytes, Costs, Nesting, Option, Seconds


@dataclass(frozen=True)
class Front:
    """Points in order of growing ``need`` and falling ``seconds``.

    ``pick[i]`` says how point i runs the first item, as an index into ``options`` or into the points of
    ``inside``, the front of a segment's own level; ``then[i]`` is its point in the front ``after``.
    """

    need: Bytes
    seconds: Seconds
    pick: Bytes
    then: Bytes
    after: Front | None
    options: tuple[Option, ...] = ()
    inside: Front | None = None

    def items(self, point: int) -> tuple[Item, ...]:
        """The schedule of a point."""
        found: list[Item] = []
        front = self
        while front.after is not None:
            pick = int(front.pick[point])
            if front.inside is None:
                found.append(front.options[pick].item)
            else:
                found.append(Segment(front.inside.items(pick)))
            point = int(front.then[point])
            front = front.after
        return tuple(found)


def front_of(costs: Costs, nesting: Nesting, limit: int, size: int, waiting: int = 0) -> Front:
    """The front of a level cut as ``nesting`` says, up to ``limit`` bytes, while ``waiting`` bytes of gradient
    wait outside."""
    held, limits = 0, []  # what the items before hold at least
    for child in nesting:
        limits.append(limit - held)
        held += (
            int(costs.output[_last(child)])
            if isinstance(child, tuple)
            else min(option.kept for option in costs.options[child])
        )
    nothing = np.zeros(1, dtype=np.int64)
    front = Front(nothing, np.zeros(1), nothing, nothing, None)
    for child, room in zip(reversed(nesting), reversed(limits)):
        if isinstance(child, tuple):
            first, last = _first(child), _last(child)
            inside = front_of(costs, child, room, size, int(costs.output[last]))
            front = _segment(costs, front, inside, first, last, waiting)
        else:
            front = _run(front, costs.options[child], waiting)
        front = _prune(front, room, size)
    return front


def _run(after: Front, options: tuple[Option, ...], waiting: int) -> Front:
    """One block in front, under each of its options."""
    need, seconds, pick, then = [], [], [], []
    for number, option in enumerate(options):
        least = option.need(waiting)
        # Of the points that all come to need this block's own bytes, only the fastest counts.
        start = max(int(np.searchsorted(after.need, least - option.kept, side="right")) - 1, 0)
        need.append(np.maximum(after.need[start:] + option.kept, least))
        seconds.append(after.seconds[start:] + option.seconds)
        then.append(np.arange(start, len(after.need)))
        pick.append(np.full(len(then[-1]), number))
    return Front(
        np.concatenate(need),
        np.concatenate(seconds),
        np.concatenate(pick),
        np.concatenate(then),
        after,
        options,
    )


def _segment(costs: Costs, after: Front, inside: Front, first: int, last: int, waiting: int) -> Front:
    """A segment in front: whatever its own level and the rest of this one need, at the one peak or the other."""
    least = waiting + int(costs.first_pass_peaks(first, last)[-1])
    rest = np.maximum(after.need + costs.output[last], least)
    if not (len(rest) and len(inside.need)):
        need = rest[:0]
    else:
        need = np.union1d(rest, inside.need)
        need = need[need >= max(rest[0], inside.need[0])]
    pick = np.searchsorted(inside.need, need, side="right") - 1
    then = np.searchsorted(rest, need, side="right") - 1
    seconds = inside.seconds[pick] + after.seconds[then] + costs.first_pass_seconds(first, last)
    return Front(need, seconds, pick, then, after, (), inside)


def _prune(front: Front, limit: int, size: int) -> Front:
    """Only points that need at most ``limit`` bytes and that no other point beats, and of many a selection."""
    order = np.argsort(front.need, kind="stable")  # a merge: the options' parts are sorted already
    need, seconds = front.need[order], front.seconds[order]
    best = np.minimum.accumulate(seconds)
    chosen = np.flatnonzero((seconds[1:] < best[:-1]) & (need[1:] <= limit)) + 1
    if len(need) and need[0] <= limit:
        chosen = np.concatenate(([0], chosen))
    last_of_need = np.append(need[chosen][1:] > need[chosen][:-1], True)[: len(chosen)]
    chosen = chosen[last_of_need]
    if len(chosen) > size:
        chosen = chosen[_thin(need[chosen], size)]
    order = order[chosen]
    return Front(
        need[chosen],
        seconds[chosen],
        front.pick[order],
        front.then[order],
        front.after,
        front.options,
        front.inside,
    )


def _thin(need: Bytes, size: int) -> Bytes:
    """The first and the last point of every cell of a grid that is finer where little memory is needed, which
    is where a byte is worth most."""
    place = np.sqrt((need - need[0]) / max(int(need[-1] - need[0]), 1))
    cell = (place * (size // 2 - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(cell, prepend=-1))
    ends = np.append(starts[1:] - 1, len(need) - 1)
    return np.union1d(starts, ends)


def _first(nesting: Nesting) -> int:
    return _first(nesting[0]) if isinstance(nesting[0], tuple) else int(nesting[0])


def _last(nesting: Nesting) -> int:
    return _last(nesting[-1]) if isinstance(nesting[-1], tuple) else int(nesting[-1])
