"""Labelled arrays in memory or in a NumPy file (.npz), split at random, and standardised by the samples that are trained on."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from typing_extensions import Self

from hvd_ckpt.data.dataset import random_split
from hvd_ckpt.text import one_line

__all__ = ["Source", "StandardisedSamples", "channel_statistics", "load"]

Source = str | os.PathLike[str] | tuple[NDArray[Any], NDArray[Any]]

MOST_CLASSES = 1 << 20
LARGEST = 1e30  # beyond it sums of squares overflow in float32
STRETCH = 1024  # samples read together, so that statistics take little memory


def load(source: Source, samples: str) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Samples, their labels, and a name for messages.

    Args:
        source: an .npz file with the arrays ``samples`` and ``labels``, or the two arrays.
        samples: the name of the array of samples.

    Raises:
        ValueError: the file is missing or not such a file; arrays are missing, empty, of unequal length or not numeric; labels are
            not whole numbers from 0. One sentence.
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
        if "pickle" in reason.lower():  # NumPy takes what is not one of its files for a pickle
            reason = "it holds Python objects, which are not loaded, or is not an .npz file"
        raise ValueError(
            f"cannot use {name}: {reason}: give an .npz file with {' and '.join(wanted)}"
        ) from None


def channel_statistics(
    values: NDArray[Any], which: NDArray[numpy.int64]
) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
    """Mean and standard deviation of each channel of some samples, values being (samples, channels, ...).

    A channel that is constant has the deviation 1.
    """
    axes = (0, *range(2, values.ndim))
    total = squares = numpy.zeros(values.shape[1])
    for first in range(0, len(which), STRETCH):
        some = values[which[first : first + STRETCH]].astype(numpy.float64)
        total = total + some.sum(axis=axes)
        squares = squares + numpy.square(some).sum(axis=axes)
    count = len(which) * numpy.prod(values.shape[2:])
    mean = total / count
    deviation = numpy.sqrt(numpy.maximum(squares / count - mean**2, 0))
    deviation[deviation <= 1e-6 * numpy.abs(mean)] = 1
    return mean.astype(numpy.float32), deviation.astype(numpy.float32)


class StandardisedSamples(ABC):
    """Samples that are split at random, and standardised by those that are trained on."""

    _chosen: NDArray[numpy.int64]
    _seed: int

    def __len__(self) -> int:
        return len(self._chosen)

    def split(self, share: float) -> tuple[Self, Self | None]:
        """Data sets for training and for evaluation: a random ``share`` of the samples, or None for a share of 0. Both are
        standardised by the samples of the first.

        Raises:
            ValueError: the share is not in [0, 1), or there is only one sample.
        """
        kept, held = random_split(len(self), share, self._seed)
        if not len(held):
            return self, None
        training, evaluation = copy.copy(self), copy.copy(self)
        training._chosen, evaluation._chosen = self._chosen[kept], self._chosen[held]
        training._standardise_by(training._chosen)
        evaluation._standardise_by(training._chosen)
        return training, evaluation

    @abstractmethod
    def _standardise_by(self, which: NDArray[numpy.int64]) -> None:
        """Takes mean and deviation of these samples."""
