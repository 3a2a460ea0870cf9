"""Where to cut a chain into segments, for every amount of memory at once.

A dynamic programme over the levels (s, t): blocks s to t of one joined run, recomputed while the gradient of
block t's output waits. A level starts with a run of block s or with a segment s to e:

    opt(s, t) = best of  run s, then opt(s + 1, t) above what the run kept
                         first pass of s..e, then opt(e + 1, t) above the output of e, then opt(s, e)

as in Beaumont et al. (2019), with several choices per block. The table keeps the least seconds of every level
for each amount of memory on a grid. Bytes are rounded up to the grid, so what is found fits; where a cell of
the grid divides all bytes, it is optimal, and else the choices are made again, exactly, inside the segments
found (:mod:`hvd_ckpt.planning.fronts`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_ckpt.planning.costs import Costs, Nesting, Seconds


class Table:
    """Least seconds of every level for every amount of memory up to ``top`` bytes, in steps of ``cell``."""

    def __init__(self, costs: Costs, cell: int, columns: int) -> None:
        self.costs = costs
        self.cell = cell
        self.columns = columns
        self._levels: list[Seconds] = [np.empty((0, 0))] * len(costs.blocks)
        self._after: list[Seconds] = [np.empty((0, 0))] * len(costs.blocks)
        self._first = list(range(len(costs.blocks)))
        for first, last in costs.runs:
            self._fill(first, last)
        self._fill_top()

    @property
    def seconds(self) -> Seconds:
        """Least seconds of the whole chain at ``column * cell`` bytes; infinite where none fits."""
        seconds: Seconds = self._top[0]
        return seconds

    def _up(self, size: int) -> int:
        return -(-int(size) // self.cell)

    def _fill(self, first: int, last: int) -> None:
        """``_levels[s][t - s + 1]`` is the level s to t, row 0 the empty level; ``_after[t][s - first]`` is the
        level s to t above the output of block s - 1: what follows a segment that ends there."""
        costs, width = self.costs, self.columns + 1
        seen: dict[tuple[int, int], int] = {}
        where: list[tuple[int, int]] = []
        for t in range(first, last + 1):
            self._first[t] = first
            self._after[t] = np.full((t - first + 1, width), np.inf)
        windows = costs.windows[costs.runs.index((first, last))]
        below: Seconds = np.zeros((1, width))
        scratch: Seconds = np.empty((last - first + 1, width))
        for s in range(last, first - 1, -1):
            rows: Seconds = np.full((last - s + 2, width), np.inf)
            rows[0] = 0.0
            self._runs(s, last, below, rows)
            with_first_pass: Seconds = np.empty((last - s + 1, width))
            steps = self._steps(s, last)
            for t in range(s, last + 1):
                row = rows[t - s + 1]
                known = seen.get((windows[s - first][t - s], t - s))
                if known is not None:
                    row[:] = self._levels[where[known][0]][t - s + 1]
                elif t >= s + 2:
                    found = scratch[: t - s - 1]
                    np.add(
                        with_first_pass[1 : t - s], self._after[t][s + 2 - first : t + 1 - first], out=found
                    )
                    for start, peak in steps:
                        if start >= t:
                            break
                        found[max(start - s - 1, 0) :, : self._up(costs.output[t] + peak)] = np.inf
                    np.minimum(row, found.min(axis=0), out=row)
                if known is None:
                    seen[(windows[s - first][t - s], t - s)] = len(where)
                    where.append((s, t))
                np.add(row, costs.first_pass_seconds(s, t), out=with_first_pass[t - s])
                if s > first:
                    shift = self._up(costs.output[s - 1])
                    if shift < width:
                        self._after[t][s - first, shift:] = row[: width - shift]
            self._levels[s] = below = rows

    def _runs(self, s: int, last: int, below: Seconds, rows: Seconds) -> None:
        """Into row t - s + 1 the least seconds of a run of block s and the level s + 1 to t after it."""
        width = self.columns + 1
        for option in self.costs.options[s]:
            needs = [self._up(option.need(int(size))) for size in self.costs.output[s : last + 1]]
            shift = self._up(option.kept)
            start = max(shift, min(needs))
            if start >= width:
                continue
            found = below[:, start - shift : width - shift] + option.seconds
            for row, need in enumerate(needs):
                if need > start:
                    found[row, : need - start] = np.inf
            np.minimum(rows[1:, start:], found, out=rows[1:, start:])

    def _steps(self, s: int, last: int) -> list[tuple[int, int]]:
        """The peak of a segment's first pass grows with its last block: the blocks where it does, and to what."""
        peaks = self.costs.first_pass_peaks(s, last)
        grows = np.flatnonzero(np.diff(peaks, prepend=-1))
        return [(s + int(index), int(peaks[index])) for index in grows]

    def _fill_top(self) -> None:
        costs, width = self.costs, self.columns + 1
        blocks = len(costs.blocks)
        self._top: Seconds = np.full((blocks + 1, width), np.inf)
        self._top[blocks] = 0.0
        for s in range(blocks - 1, -1, -1):
            self._runs_top(s)
            peaks = costs.first_pass_peaks(s, costs.last[s])
            for e in range(s + 1, min(costs.last[s], blocks - 2) + 1):
                shift = self._up(costs.output[e])
                start = max(shift, self._up(peaks[e - s]))
                if start >= width:
                    continue
                found = self._levels[s][e - s + 1, start:] + self._top[e + 1, start - shift : width - shift]
                found += costs.first_pass_seconds(s, e)
                np.minimum(self._top[s, start:], found, out=self._top[s, start:])

    def _runs_top(self, s: int) -> None:
        width = self.columns + 1
        for option in self.costs.options[s]:
            shift = self._up(option.kept)
            start = max(shift, self._up(option.need(0)))
            if start < width:
                found = self._top[s + 1, start - shift : width - shift] + option.seconds
                np.minimum(self._top[s, start:], found, out=self._top[s, start:])

    def nesting(self, column: int) -> Nesting:
        """The nesting that reaches ``seconds[column]``, which must be finite."""
        costs, last = self.costs, len(self.costs.blocks) - 1
        found: list[Any] = []
        s = 0
        while s <= last:
            run, kept = self._best_run(s, 0, self._top[s + 1], column)
            best, end = np.inf, s
            peaks = costs.first_pass_peaks(s, costs.last[s])
            for e in range(s + 1, min(costs.last[s], last - 1) + 1):
                free = column - self._up(costs.output[e])
                if free >= 0 and column >= self._up(peaks[e - s]):
                    seconds = self._levels[s][e - s + 1, column] + self._top[e + 1, free]
                    seconds += costs.first_pass_seconds(s, e)
                    if seconds < best:
                        best, end = seconds, e
            if run <= best:
                found.append(s)
                column -= kept
            else:
                found.append(self._nesting_inside(s, end, column))
                column -= self._up(costs.output[end])
            s = end + 1 if run > best else s + 1
        return tuple(found)

    def _nesting_inside(self, s: int, t: int, column: int) -> Nesting:
        costs, found = self.costs, list[Any]()
        waiting = int(costs.output[t])
        while s <= t:
            below = self._levels[s + 1][t - s] if s < t else np.zeros(self.columns + 1)
            run, kept = self._best_run(s, waiting, below, column)
            best, end = np.inf, s
            if t >= s + 2:
                first = self._first[t]
                seconds = (
                    self._levels[s][2 : t - s + 1, column] + costs.forward[s + 2 : t + 1] - costs.forward[s]
                )
                seconds += self._after[t][s + 2 - first : t + 1 - first, column]
                cells = -(-(waiting + costs.first_pass_peaks(s, t)[1 : t - s]) // self.cell)
                seconds[cells > column] = np.inf
                end = s + 1 + int(seconds.argmin())
                best = seconds[end - s - 1]
            if run <= best:
                found.append(s)
                column -= kept
                s += 1
            else:
                found.append(self._nesting_inside(s, end, column))
                column -= self._up(costs.output[end])
                s = end + 1
        return tuple(found)

    def _best_run(self, s: int, waiting: int, below: Seconds, column: int) -> tuple[float, int]:
        """Least seconds of a level that starts with a run of block ``s``, and the cells that run keeps."""
        best, kept = np.inf, 0
        for option in self.costs.options[s]:
            shift = self._up(option.kept)
            if column >= max(shift, self._up(option.need(waiting))):
                seconds = float(below[column - shift]) + option.seconds
                if seconds < best:
                    best, kept = seconds, shift
        return best, kept
