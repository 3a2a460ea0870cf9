"""Common parts of data sets: their protocol, random numbers, splits, and labelled arrays of NumPy files.

Random numbers are a function of seed, epoch and sample, so they do not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.utils.text import one_line

Integers = NDArray[numpy.int64]

Source = str | os.PathLike[str] | tuple[NDArray[Any], NDArray[Any]]

MOST_CLASSES = 1 << 20
LARGEST = 1e30  # sums of squares of larger numbers overflow in float32
STRETCH = 1024  # samples that are read at a time, so that statistics take little memory


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


def generators(
    purpose: Purpose, seed: int, epochs: Integers, samples: Integers
) -> Iterator[numpy.random.Generator]:
    """The :func:`generator` of each sample in its epoch."""
    for epoch, sample in zip(epochs.tolist(), samples.tolist()):
        yield generator(purpose, seed, epoch, sample)


def check_samples(indices: Sequence[int], epoch: Sequence[int], samples: int) -> tuple[Integers, Integers]:
    """Sample numbers and epochs as arrays.

    Raises:
        IndexError: a sample number is out of range.
        ValueError: the numbers of epochs and samples differ, or the batch is empty.
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
    """The number of samples for evaluation: that share of them, with at least one on each side; 0 for a share of 0.

    Raises:
        ValueError: there is only one sample.
    """
    if not share:
        return 0
    if samples < 2:
        raise ValueError(f"{samples} sample cannot be split into training and evaluation: give at least two")
    return min(max(round(share * samples), 1), samples - 1)


class ConsecutiveSamples:
    """Samples whose last ones are for evaluation.

    Args:
        count: number of samples.
        seed: seed of random numbers.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._first, self._count, self._seed = 0, count, seed

    def __len__(self) -> int:
        return self._count

    def split(self, share: float) -> tuple[Self, Self | None]:
        """Data sets for training and for evaluation. The latter has the last ``share`` of the samples; None for a share of 0.

        Raises:
            ValueError: there is only one sample.
        """
        count = validation_size(self._count, share)
        training = self._part(0, self._count - count)
        return training, self._part(len(training), count) if count else None

    def _part(self, first: int, count: int) -> Self:
        part = copy.copy(self)
        part._first, part._count = self._first + first, count
        return part


# ------------------------------------------------------------------------------------ labelled arrays


def load_arrays(source: Source, samples: str) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Samples, their labels, and a name of the source for messages.

    Args:
        source: an .npz file with the arrays ``samples`` and ``labels``, or the two arrays.
        samples: the name of the array of samples.

    Raises:
        ValueError: the file is missing or invalid; arrays are missing, empty, of different lengths or not numeric; or labels are
            not whole numbers from 0. The message is one sentence.
    """
    if isinstance(source, tuple):
        name = "the arrays"
        values, labels = (numpy.asarray(array) for array in source)
    else:
        name = f"the file '{os.fspath(source)}'"
        values, labels = _read(Path(source), name, (samples, "labels"))
    if values.dtype.kind not in "buif" or not values.ndim or not values.size:
        raise ValueError(f"{name}: {samples} of type {values.dtype} and shape {values.shape}: give numbers")
    if labels.dtype.kind not in "bui" or labels.shape[:1] != values.shape[:1]:
        raise ValueError(
            f"{name}: labels of type {labels.dtype} and shape {labels.shape}: give whole numbers for {len(values)} {samples}"
        )
    if labels.size and (labels.min() < 0 or labels.max() >= MOST_CLASSES):
        raise ValueError(f"{name}: labels from {labels.min()} to {labels.max()}: number the classes from 0")
    if values.dtype.kind == "f" and not all(
        (numpy.abs(values[first : first + STRETCH]) <= LARGEST).all()
        for first in range(0, len(values), STRETCH)
    ):
        raise ValueError(f"{name}: {samples} have numbers that are not finite, or above {LARGEST:g}")
    return values, labels, name


def _read(path: Path, name: str, wanted: tuple[str, ...]) -> list[NDArray[Any]]:
    try:
        if not path.is_file() and path.exists():
            raise ValueError("it is a folder or a device")
        with numpy.load(path, allow_pickle=False) as file:
            return [numpy.asarray(file[key]) for key in wanted]
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from None
    except Exception as error:  # zipfile, zlib and NumPy raise nearly anything for a damaged file
        reason = one_line(str(error)) or type(error).__name__
        if "pickle" in reason.lower():  # NumPy takes any other file for a pickle
            reason = "it holds Python objects, which are not loaded, or is not an .npz file"
        raise ValueError(
            f"cannot use {name}: {reason}: give an .npz file with {' and '.join(wanted)}"
        ) from None


def channel_statistics(
    values: NDArray[Any], which: Integers
) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
    """Mean and standard deviation of each channel over the samples ``which`` of ``values`` (samples, channels, ...).

    A constant channel has the deviation 1.
    """
    # Sums in float64 over one stretch of samples at a time, so that no copy of all samples is made.
    axes = (0, *range(2, values.ndim))
    total = squares = numpy.zeros(values.shape[1])
    for first in range(0, len(which), STRETCH):
        some = values[which[first : first + STRETCH]].astype(numpy.float64)
        total = total + some.sum(axis=axes)
        squares = squares + numpy.square(some).sum(axis=axes)
    count = len(which) * numpy.prod(values.shape[2:])
    mean = total / count
    deviation = numpy.sqrt(numpy.maximum(squares / count - mean**2, 0))
    # Such a deviation is rounding of the sums: dividing by it would make noise of a constant channel.
    deviation[deviation <= 1e-6 * numpy.abs(mean)] = 1
    return mean.astype(numpy.float32), deviation.astype(numpy.float32)


class StandardisedSamples(ABC):
    """Samples that are split at random, and standardised by the statistics of the training samples."""

    _chosen: Integers
    _seed: int

    def __len__(self) -> int:
        return len(self._chosen)

    def split(self, share: float) -> tuple[Self, Self | None]:
        """Data sets for training and for evaluation. The latter has a random ``share`` of the samples; None for a share of 0.

        Both are standardised by the training samples.

        Raises:
            ValueError: there is only one sample.
        """
        count = validation_size(len(self), share)
        if not count:
            return self, None
        order = generator(Purpose.SPLIT, self._seed).permutation(len(self))
        training, evaluation = copy.copy(self), copy.copy(self)
        training._chosen = self._chosen[numpy.sort(order[count:])]
        evaluation._chosen = self._chosen[numpy.sort(order[:count])]
        for part in (training, evaluation):
            part._standardise_by(training._chosen)
        return training, evaluation

    @abstractmethod
    def _standardise_by(self, which: Integers) -> None:
        """Sets mean and deviation to those of these samples."""
