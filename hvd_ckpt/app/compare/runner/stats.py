"""Statistics of timings: alternating rounds, the slowest rank, ratios within a round.

A machine gets slower and faster while it measures. So engines alternate (A B C, then C B A), a ratio is taken between neighbours in
time, and a report gives the median over rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


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
