"""Statistics of timings: alternating rounds, the slowest rank, ratios within a round, quartiles.

A machine gets slower and faster while it measures. So engines alternate (A B C, then C B A), a ratio is taken between neighbours in
time, and a report gives the median over rounds with its quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Quartiles:
    """The median and the quartiles of a sample; in a format string ``1.02 [0.99, 1.05]``, as in ``f"{quartiles:.2f}"``."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> Quartiles:
        """The quartiles in another unit."""
        return Quartiles(self.median * factor, self.low * factor, self.high * factor)

    def __format__(self, form: str) -> str:
        if self.low == self.median == self.high:  # as of one value
            return f"{self.median:{form}}"
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least one value, interpolated between neighbours; of one value, all three are that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


def alternating(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """The number of the round, from 0, and the item whose turn it is: A B C, C B A, A B C, ..."""
    for number in range(rounds):
        for item in items if number % 2 == 0 else items[::-1]:
            yield number, item


def slowest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """The time of the slowest rank in each step (or round), from the times of each rank: all wait for it."""
    return [max(step) for step in zip(*ranks)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio in each round that both have finished."""
    return [our / their for our, their in zip(ours, theirs)]


def quartiles_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles | None:
    """The quartiles of the ratios over the rounds; None where there is no round that both have finished."""
    values = ratios(ours, theirs)
    return quartiles(values) if values else None
