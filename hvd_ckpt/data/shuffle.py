"""A random permutation that is computed where it is asked for and never stored: a billion samples cost nothing.

A Feistel network on pairs of numbers, with cycle walking, as in J. Black and P. Rogaway, "Ciphers with arbitrary finite
domains" (2002). Being integer arithmetic, it is the same in every version of every library, as a split into
training and evaluation samples has to be.
"""

from __future__ import annotations

import math

import numpy
from numpy.typing import NDArray

__all__ = ["Shuffle"]

ROUNDS = 8  # four make a Feistel network of good functions a strong one; tiny domains mix more slowly
MOST_SAMPLES = 2**62


class Shuffle:
    """A permutation of ``range(samples)`` that depends on the key alone.

    Args:
        samples: at most 2**62.
        key: integers from 0 to 2**64 - 1.
    """

    def __init__(self, samples: int, *key: int) -> None:
        if not 0 < samples <= MOST_SAMPLES:
            raise ValueError(f"{samples} samples cannot be shuffled: give 1 to 2**62")
        self._samples = samples
        # Numbers below rows * columns, which is hardly more than samples, as pairs (row, column).
        columns = math.isqrt(samples - 1) + 1
        self._columns = numpy.uint64(columns)
        self._rows = numpy.uint64(-(-samples // columns))
        words = numpy.array(key, dtype=numpy.uint64).view(numpy.uint32)
        self._keys = numpy.random.SeedSequence(words).generate_state(ROUNDS, numpy.uint64)

    def __call__(self, positions: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """What stands at these positions of the permutation, each from 0 to ``samples - 1``."""
        found = self._permute(positions.astype(numpy.uint64))
        # Walk on along the cycle: it comes back to where it began, which is inside, so it ends.
        outside = found >= self._samples
        while outside.any():
            found[outside] = self._permute(found[outside])
            outside = found >= self._samples
        return found.astype(numpy.int64)

    def _permute(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        rows, columns = numpy.divmod(values, self._columns)
        for at, key in enumerate(self._keys):
            if at % 2:
                rows = (rows + _mix(columns + key) % self._rows) % self._rows
            else:
                columns = (columns + _mix(rows + key) % self._columns) % self._columns
        permuted: NDArray[numpy.uint64] = rows * self._columns + columns
        return permuted


def _mix(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: NDArray[numpy.uint64] = values ^ (values >> numpy.uint64(31))
    return mixed
