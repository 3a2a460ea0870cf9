"""A line through samples of a process's memory, which lies on plateaus and is no independent noise around a line.

The samples are put into blocks of equal length, and the line goes through the blocks' means (the method of batch means: within a
block samples resemble each other, between blocks hardly), by least squares. So the standard error of the slope is that of
as many observations as there really are, and a single step up or down is noise of that size, not growth with certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["LEFT_OUT", "Line", "fit_line", "without_start"]

LEFT_OUT = 0.2  # of the time, at the start
BLOCKS = 12
ERRORS = 3.0  # standard errors that a flat line's slope may be above zero
SMALL = 0.01  # of the mean, growth over the whole time that counts as none


@dataclass(frozen=True)
class Line:
    """A fitted line.

    Attributes:
        mean: of the values.
        slope: per hour, in the values' unit.
        error: the slope's standard error.
        growth: what the line rises from the first sample to the last.
    """

    mean: float
    slope: float
    error: float
    growth: float

    @property
    def flat(self) -> bool:
        """Whether nothing grows: the slope is at most 3 standard errors above zero, or the growth below 1 % of the mean."""
        return self.slope <= ERRORS * self.error or self.growth < SMALL * self.mean


def without_start(times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The samples after the first fifth of the time."""
    if not times:
        return [], []
    start = times[0] + LEFT_OUT * (times[-1] - times[0])
    kept = [(moment, value) for moment, value in zip(times, values) if moment >= start]
    return [moment for moment, _ in kept], [value for _, value in kept]


def fit_line(times: Sequence[float], values: Sequence[float]) -> Line:
    """The line through samples.

    Args:
        times: seconds, rising.
        values: as many, in any unit.

    Raises:
        ValueError: there are fewer than 3 samples.
    """
    if len(times) < 3:
        raise ValueError(f"a line needs 3 samples or more, there are {len(times)}: sample longer")
    blocks = min(BLOCKS, len(times))
    edges = [len(times) * number // blocks for number in range(blocks + 1)]
    x = [_mean(times[low:high]) / 3600 for low, high in pairwise(edges)]
    y = [_mean(values[low:high]) for low, high in pairwise(edges)]
    mean_x, mean_y = _mean(x), _mean(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    slope = sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y)) / spread
    rest = sum((other - mean_y - slope * (one - mean_x)) ** 2 for one, other in zip(x, y))
    error = math.sqrt(rest / (blocks - 2) / spread)
    return Line(_mean(values), slope, error, slope * (times[-1] - times[0]) / 3600)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
