"""What a data set is, and how one draws at random: by seed, epoch and sample number, so that ranks do not matter."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy
from numpy.typing import NDArray

from hvd_ckpt.data.shuffle import Shuffle
from hvd_ckpt.models.batch import Batch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Dataset",
    "Purpose",
    "StandardisedSamples",
    "check_seed",
    "generators",
    "held_out",
    "numbers",
    "random_split",
    "uniform",
]

Integers = NDArray[numpy.int64]
Floats = NDArray[numpy.float64]

SEEDS = 2**63


class Dataset(Protocol):
    """Numbered samples; ``len()`` says how many."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        """The samples of these numbers, in this order.

        Args:
            indices: sample numbers from 0 to ``len(self) - 1``.
            epoch: for each of them the epoch that it is drawn in; what changes from epoch to epoch is drawn anew.

        Raises:
            IndexError: there is no sample of such a number.
        """
        ...


class Purpose(IntEnum):
    """What random numbers are for; each purpose draws from a stream of its own."""

    ORDER = 0
    SPLIT = 1
    MASK = 2
    PERMUTATION = 3
    AUGMENTATION = 4
    VOLUME = 5


def check_seed(seed: int) -> int:
    """The seed, if it is one.

    Raises:
        ValueError: it is negative or has more than 63 bits.
    """
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed: {seed} is no number from 0 to 2**63 - 1")
    return seed


def numbers(indices: Sequence[int], epoch: Sequence[int], samples: int) -> tuple[Integers, Integers]:
    """Sample numbers and epochs as arrays.

    Raises:
        IndexError: there is no sample of such a number.
        ValueError: there are not as many epochs as sample numbers, or none.
    """
    which, epochs = numpy.asarray(indices, dtype=numpy.int64), numpy.asarray(epoch, dtype=numpy.int64)
    if which.ndim != 1 or which.shape != epochs.shape or not len(which):
        raise ValueError(
            f"a batch takes one epoch for each of its samples: got {which.size} samples, {epochs.size} epochs"
        )
    if which.min() < 0 or which.max() >= samples:
        wrong = which[(which < 0) | (which >= samples)][0]
        raise IndexError(f"there is no sample {wrong}: the data set has {samples}")
    return which, epochs


def generators(
    seed: int, epochs: Integers, samples: Integers, purpose: Purpose
) -> Iterator[numpy.random.Generator]:
    """For each sample a generator of random numbers, which depends on nothing but these four numbers."""
    key = numpy.empty((len(samples), 4), dtype=numpy.uint64)
    key[:, 0], key[:, 1], key[:, 2], key[:, 3] = seed, epochs, samples, purpose
    # All 64 bits of each: a SeedSequence takes words of 32 bits, and a list of ints would give a large one two words.
    for words in key.view(numpy.uint32):
        yield numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(words)))


def uniform(seed: int, epochs: Integers, samples: Integers, purpose: Purpose, count: int) -> Floats:
    """For each sample ``count`` uniform random numbers in [0, 1), shaped (samples, count)."""
    drawn = numpy.empty((len(samples), count))
    for row, generator in zip(drawn, generators(seed, epochs, samples, purpose)):
        generator.random(out=row)
    return drawn


def held_out(samples: int, share: float) -> int:
    """How many of the samples are for evaluation: that share, and one at least on either side; none for a share of 0.

    Raises:
        ValueError: the share is below 0 or not below 1, or there is just one sample.
    """
    if not 0 <= share < 1:
        raise ValueError(
            f"the share of samples held out for evaluation is {share}: give 0, or more but less than 1"
        )
    if not share:
        return 0
    if samples < 2:
        raise ValueError(f"{samples} sample cannot be split into training and evaluation: give two at least")
    return min(max(round(share * samples), 1), samples - 1)


def random_split(samples: int, share: float, seed: int) -> tuple[Integers, Integers]:
    """The numbers of the samples to train on and to hold out, as :func:`held_out` counts them, chosen by the seed alone."""
    count = held_out(samples, share)
    order = Shuffle(samples, check_seed(seed), Purpose.SPLIT)(numpy.arange(samples))
    return numpy.sort(order[count:]), numpy.sort(order[:count])


class StandardisedSamples(ABC):
    """Samples that are split at random, and standardised by those that are trained on."""

    _chosen: Integers
    _seed: int

    def __len__(self) -> int:
        return len(self._chosen)

    def split(self, share: float, seed: int | None = None) -> tuple[Self, Self | None]:
        """Data sets for training and for evaluation: a random ``share`` of the samples, or None for a share of 0. Both are
        standardised by the samples of the first.

        Args:
            share: of the samples to hold out.
            seed: of the choice; by default that of the data set.

        Raises:
            ValueError: the share is below 0 or not below 1, or there is just one sample.
        """
        kept, held = random_split(len(self), share, self._seed if seed is None else seed)
        if not len(held):
            return self, None
        training, evaluation = copy.copy(self), copy.copy(self)
        training._chosen, evaluation._chosen = self._chosen[kept], self._chosen[held]
        training._standardise_by(training._chosen)
        evaluation._standardise_by(training._chosen)
        return training, evaluation

    @abstractmethod
    def _standardise_by(self, which: Integers) -> None:
        """Takes mean and deviation of these samples."""
