"""Data sets, and random numbers that are a function of seed, epoch and sample, so that the number of ranks does not matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import numpy
from numpy.typing import NDArray

from hvd_ckpt.models.batch import Batch

__all__ = [
    "Dataset",
    "Purpose",
    "check_samples",
    "check_seed",
    "generator",
    "random_split",
    "validation_size",
]

Integers = NDArray[numpy.int64]

SEEDS = 2**63


class Dataset(Protocol):
    """Numbered samples; ``len()`` gives their number."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples with these numbers, in this order.

        Args:
            indices: sample numbers from 0 to ``len(self) - 1``.
            epoch: for each of them the epoch in which it is drawn; masks and orders differ from epoch to epoch.

        Raises:
            IndexError: a sample number is out of range.
        """
        ...


class Purpose(IntEnum):
    """Streams of random numbers, independent of each other."""

    ORDER = 0
    SPLIT = 1
    MASK = 2
    PERMUTATION = 3
    VOLUME = 4


def check_seed(seed: int) -> int:
    """The seed.

    Raises:
        ValueError: it is negative or has more than 63 bits.
    """
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed {seed}: give a number from 0 to 2**63 - 1")
    return seed


def generator(purpose: Purpose, seed: int, epoch: int = 0, sample: int = 0) -> numpy.random.Generator:
    """A generator of random numbers that depends on these four numbers alone."""
    # All 64 bits of each: a SeedSequence takes words of 32 bits, and a list of ints would give a large one two words.
    key = numpy.array([seed, epoch, sample, purpose], dtype=numpy.uint64).view(numpy.uint32)
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))


def generators(
    purpose: Purpose, seed: int, epochs: Integers, samples: Integers
) -> Iterator[numpy.random.Generator]:
    """For each sample the :func:`generator` of its epoch."""
    for epoch, sample in zip(epochs.tolist(), samples.tolist()):
        yield generator(purpose, seed, epoch, sample)


def check_samples(indices: Sequence[int], epoch: Sequence[int], samples: int) -> tuple[Integers, Integers]:
    """Sample numbers and epochs as arrays.

    Raises:
        IndexError: a sample number is out of range.
        ValueError: there are not as many epochs as sample numbers, or there are none.
    """
    which, epochs = numpy.asarray(indices, dtype=numpy.int64), numpy.asarray(epoch, dtype=numpy.int64)
    if which.ndim != 1 or which.shape != epochs.shape or not len(which):
        raise ValueError(
            f"a batch needs an epoch for each sample: got {which.size} samples, {epochs.size} epochs"
        )
    if which.min() < 0 or which.max() >= samples:
        wrong = which[(which < 0) | (which >= samples)][0]
        raise IndexError(f"sample {wrong} does not exist: the data set has {samples}")
    return which, epochs


def validation_size(samples: int, share: float) -> int:
    """The number of samples to hold out for evaluation: that share of them, but at least one on either side; 0 for a share of 0.

    Raises:
        ValueError: the share is not in [0, 1), or there is only one sample.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share of samples held out for evaluation {share}: give a number from 0, below 1")
    if not share:
        return 0
    if samples < 2:
        raise ValueError(f"{samples} sample cannot be split into training and evaluation: give at least two")
    return min(max(round(share * samples), 1), samples - 1)


def random_split(samples: int, share: float, seed: int) -> tuple[Integers, Integers]:
    """The numbers of the samples to train on and of those to hold out, chosen at random by the seed."""
    count = validation_size(samples, share)
    order = generator(Purpose.SPLIT, check_seed(seed)).permutation(samples)
    return numpy.sort(order[count:]), numpy.sort(order[:count])
