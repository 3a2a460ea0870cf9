"""The numbers of a chain as the dynamic programmes need them: the ways to run each block less the dominated
ones, the first pass of every segment, and which stretches of the chain are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ckpt.planning.chain import Block, Run, Segment

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]

# How a chain is cut into segments: nested tuples of block indices, in which a tuple is a segment and an index a
# block whose choice is left open. (Any: mypy's strict mode has no place for a recursive alias.)
Nesting = tuple[Any, ...]


@dataclass(frozen=True)
class Option:
    """One item that covers a single block: a run, or a segment of that block alone, seen as a choice."""

    item: Run | Segment
    seconds: float
    kept: int
    forward_peak: int
    backward_peak: int

    def need(self, waiting: int) -> int:
        """Bytes that must be free when the block starts, for its own forward and backward."""
        return max(waiting + self.forward_peak, self.backward_peak)

    def dominates(self, other: Option) -> bool:
        """At least as good in every respect."""
        return (
            self.seconds <= other.seconds
            and self.kept <= other.kept
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
        )


class Costs:
    """The numbers of a chain as the programmes need them.

    Raises:
        ValueError: for a chain without blocks.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            raise ValueError("the chain has no blocks: give at least one")
        self.blocks = tuple(blocks)
        self.output = np.array([block.output for block in blocks], dtype=np.int64)
        self.forward = np.concatenate(([0.0], np.cumsum([block.forward_seconds for block in blocks])))
        self.runs = _joined_runs(blocks)
        self.last = list(range(len(blocks)))  # of the joined run that a block lies in
        for first, last in self.runs:
            self.last[first : last + 1] = [last] * (last + 1 - first)
        joined = {index for first, last in self.runs for index in range(first, last + 1)}
        self._peaks = [_first_pass_peaks(self, first) for first in range(len(blocks))]
        self.windows = [_windows(blocks, first, last) for first, last in self.runs]
        self.options = [_options(index, block, index in joined) for index, block in enumerate(blocks)]

    def first_pass_seconds(self, first: int, last: int) -> float:
        return float(self.forward[last + 1] - self.forward[first])

    def first_pass_peaks(self, first: int, last: int) -> Bytes:
        """Peak of the first pass of a segment from ``first`` to each block up to ``last``, above its start."""
        return self._peaks[first][: last + 1 - first]


def _joined_runs(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """First and last block of every run of two or more blocks that join."""
    runs, first = [], 0
    for index, block in enumerate(blocks):
        if not block.joins_next or index == len(blocks) - 1:
            if index > first:
                runs.append((first, index))
            first = index + 1
    return runs


def _first_pass_peaks(costs: Costs, first: int) -> Bytes:
    stretch = costs.blocks[first : costs.last[first] + 1]
    working = np.array([max(block.forward_working, block.output) for block in stretch], dtype=np.int64)
    working[1:] += costs.output[first : costs.last[first]]
    return np.maximum.accumulate(working)


def _options(index: int, block: Block, joined: bool) -> tuple[Option, ...]:
    """The ways to run one block, less those that another is at least as good as in every respect."""
    found = [
        Option(
            Run(index, number),
            choice.seconds,
            choice.kept,
            max(choice.forward_peak, choice.kept),
            choice.backward_peak,
        )
        for number, choice in enumerate(block.choices)
    ]
    if joined:
        found += [_alone(index, block, option) for option in found]
    found.sort(key=lambda option: (option.seconds, option.kept, option.forward_peak, option.backward_peak))
    front: list[Option] = []
    for option in found:
        if not any(better.dominates(option) for better in front):
            front.append(option)
    return tuple(front)


def _alone(index: int, block: Block, inner: Option) -> Option:
    """A segment of this block alone: nothing but its output is held, and its forward runs twice."""
    return Option(
        Segment((inner.item,)),
        block.forward_seconds + inner.seconds,
        block.output,
        max(block.forward_working, block.output),
        inner.need(block.output),
    )


def _windows(blocks: Sequence[Block], first: int, last: int) -> list[list[int]]:
    """``[s - first][t - s]``: a number for the costs of blocks s to t; alike windows have the same number."""
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    windows: list[list[int]] = []
    for s in range(first, last + 1):
        block = blocks[s]
        ways = tuple(
            (choice.seconds, choice.kept, choice.forward_peak, choice.backward_peak)
            for choice in block.choices
        )
        windows.append([number((ways, block.output, block.forward_seconds, block.forward_working))])
    for length in range(1, last - first + 1):
        for s in range(last - first + 1 - length):
            windows[s].append(number((windows[s][length - 1], windows[s + 1][length - 1])))
    return windows
