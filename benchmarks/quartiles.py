"""Medians with their quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ckpt.app.compare.runner.stats import ratios


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


def quartiles_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles | None:
    """The quartiles of the ratios over the rounds; None where there is no round that both have finished."""
    values = ratios(ours, theirs)
    return quartiles(values) if values else None
