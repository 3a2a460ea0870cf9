"""The least memory that a chain can run in, and the segments that reach it.

A dynamic programme over sub-chains as in :mod:`hvd_ckpt.planning.table`, but for one exact number per level,
its least peak, instead of seconds over a grid of memory. So the answer is right to the byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_ckpt.planning.costs import Bytes, Costs, Nesting


def smallest_nesting(costs: Costs) -> tuple[int, Nesting]:
    """The least peak that any schedule reaches, exact to the byte, and a nesting that reaches it."""
    blocks, output = len(costs.blocks), costs.output
    least: Bytes = np.zeros((blocks + 1, blocks + 1), dtype=np.int64)  # [s, t + 1]: level of blocks s to t
    end = np.zeros((blocks + 1, blocks + 1), dtype=np.int64)  # last block of the level's first segment, or 0
    for first, last in costs.runs:
        for s in range(last, first - 1, -1):
            levels = slice(s + 1, last + 2)
            least[s, levels] = _least_run(costs, s, least[s + 1, levels], output[s : last + 1])
            peaks = costs.first_pass_peaks(s, last)
            for t in range(s + 2, last + 1):
                _least_segment(least[s], end[s], least[s + 2 : t + 1, t + 1], peaks, output, s, t)
    # The whole chain is a level in which no gradient waits.
    top: Bytes = np.zeros(blocks + 1, dtype=np.int64)
    top_end = [0] * blocks
    for s in range(blocks - 1, -1, -1):
        top[s] = _least_run(costs, s, top[s + 1 : s + 2], np.zeros(1, dtype=np.int64))[0]
        last = min(costs.last[s], blocks - 2)
        if last > s:
            after = np.maximum(output[s + 1 : last + 1] + top[s + 2 : last + 2], least[s, s + 2 : last + 2])
            candidates = np.maximum(after, costs.first_pass_peaks(s, last)[1:])
            best = int(candidates.argmin())
            if candidates[best] < top[s]:
                top[s], top_end[s] = candidates[best], s + 1 + best

    def cut(s: int, t: int, ends: Any) -> Nesting:
        found: list[Any] = []
        while s <= t:
            e = int(ends(s, t))
            found.append(cut(s, e, lambda s, t: end[s, t + 1]) if e else s)
            s = (e or s) + 1
        return tuple(found)

    return int(top[0]), cut(0, blocks - 1, lambda s, _: top_end[s])


def _least_run(costs: Costs, s: int, after: Bytes, waiting: Bytes) -> Bytes:
    """Least peaks of levels that start with a run of block ``s``, for each that may follow."""
    least: Bytes = np.full(len(after), np.iinfo(np.int64).max)
    for option in costs.options[s]:
        need = np.maximum(waiting + option.forward_peak, option.backward_peak)
        np.minimum(least, np.maximum(need, option.kept + after), out=least)
    return least


def _least_segment(
    least: Bytes, end: Bytes, after: Bytes, peaks: Bytes, output: Bytes, s: int, t: int
) -> None:
    """Improve ``least[t + 1]``, the level s to t, by starting with a segment of two blocks or more."""
    inside = np.maximum(output[s + 1 : t] + after, least[s + 2 : t + 1])
    candidates = np.maximum(inside, output[t] + peaks[1 : t - s])
    best = int(candidates.argmin())
    if candidates[best] < least[t + 1]:
        least[t + 1], end[t + 1] = candidates[best], s + 1 + best
