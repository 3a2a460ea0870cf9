"""Common parts of data sets: their protocol, random numbers, and splits.

Random numbers are a function of seed, epoch and sample, so they do not depend on the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

from hvd_ckpt.data.objectives import Batch

Integers = NDArray[numpy.int64]


class Dataset(Protocol):
    """Numbered samples; ``len()`` is their number."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples with these numbers, in this order.

        Args:
            indices: sample numbers from 0 to ``len(self) - 1``.
            epoch: for each sample, the epoch in which it is drawn. Masks and orders differ between epochs.

        Raises:
            IndexError: a sample number is out of range.
        """
        ...


class Purpose(IntEnum):
    """Independent streams of random numbers."""

    ORDER = 0
    SPLIT = 1
    MASK = 2
    PERMUTATION = 3
    VOLUME = 4


def generator(purpose: Purpose, seed: int, epoch: int = 0, sample: int = 0) -> numpy.random.Generator:
    """A generator of random numbers that depends on these four numbers only."""
    # Two words of 32 bits for each number. A list of ints would give one word to a small number and two to a large one.
    key = numpy.array([seed, epoch, sample, purpose], dtype=numpy.uint64).view(numpy.uint32)
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))


class NumberedSamples:
    """Samples that can be split into some to train on and others to evaluate on.

    Args:
        count: number of samples.
        seed: seed of random numbers.
    """

    split_at_random = True

    def __init__(self, count: int, seed: int) -> None:
        self._seed = seed
        self._numbers: range | Integers = range(count)  # of the samples in the whole data set

    def __len__(self) -> int:
        return len(self._numbers)

    def split(self, share: float) -> tuple[Self, Self | None]:
        """Data sets for training and for evaluation. The latter has ``share`` of the samples, random ones or the last ones, with at
        least one on each side; it is None for a share of 0.

        Raises:
            ValueError: there is only one sample.
        """
        samples = len(self)
        if not share:
            return self, None
        if samples < 2:
            raise ValueError(
                f"{samples} sample cannot be split into training and evaluation: give at least two"
            )
        count = min(max(round(share * samples), 1), samples - 1)
        training, evaluation = copy.copy(self), copy.copy(self)
        training._numbers, evaluation._numbers = self._numbers[:-count], self._numbers[-count:]
        if self.split_at_random:
            order, numbers = (
                generator(Purpose.SPLIT, self._seed).permutation(samples),
                numpy.asarray(self._numbers),
            )
            # Sorted, so that files are read in order; which samples are in a part is random all the same.
            training._numbers, evaluation._numbers = (
                numbers[numpy.sort(part)] for part in (order[count:], order[:count])
            )
        return training, evaluation

    def _find(self, indices: Sequence[int], epoch: Sequence[int]) -> tuple[Integers, Integers]:
        """The numbers of samples in the whole data set, which do not depend on the part that they are in, and their epochs.

        Raises:
            IndexError: a sample number is out of range.
            ValueError: the numbers of epochs and samples differ, or the batch is empty.
        """
        which, epochs = numpy.asarray(indices, dtype=numpy.int64), numpy.asarray(epoch, dtype=numpy.int64)
        if which.ndim != 1 or which.shape != epochs.shape or not len(which):
            raise ValueError(
                f"a batch needs an epoch for each sample: got {which.size} samples, {epochs.size} epochs"
            )
        if which.min() < 0 or which.max() >= len(self):
            wrong = which[(which < 0) | (which >= len(self))][0]
            raise IndexError(f"sample {wrong} does not exist: the data set has {len(self)}")
        numbers = self._numbers
        return which + numbers.start if isinstance(numbers, range) else numbers[which], epochs
