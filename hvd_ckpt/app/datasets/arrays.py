"""Labelled arrays of NumPy files, and samples that are standardised by channel."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import Self

from hvd_ckpt.data.dataset import Integers, NumberedSamples
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.utils.text import one_line

Source = str | os.PathLike[str] | tuple[NDArray[Any], NDArray[Any]]

MOST_CLASSES = 1 << 20
LARGEST = 1e30  # sums of squares of larger numbers overflow in float32
STRETCH = 1024  # samples that are read at a time, so that statistics take little memory


class StandardisedSamples(NumberedSamples, ABC):
    """Labelled samples, standardised by the mean and deviation of each channel of the training samples.

    The inputs of a batch are the samples (samples, channels, ...), float32, and its targets are their labels.

    Args:
        labels: classes as whole numbers from 0, of each sample or of each of its elements.
        channels, classes: numbers of channels and classes.
    """

    def __init__(self, labels: NDArray[Any], channels: int, classes: int, seed: int) -> None:
        super().__init__(len(labels), seed)
        self.channels, self.classes, self._labels = channels, classes, labels
        self._standardise()

    def split(self, share: float) -> tuple[Self, Self | None]:
        training, evaluation = super().split(share)
        if evaluation is not None:
            training._standardise()
            evaluation._mean, evaluation._deviation = training._mean, training._deviation
        return training, evaluation

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        which, _ = self._find(indices, epoch)
        samples = self._samples(which)
        shape = (-1, *[1] * (samples.dim() - 2))
        samples = (samples - self._mean.view(shape)) / self._deviation.view(shape)
        return Batch((samples,), self._targets(which))

    @abstractmethod
    def _samples(self, which: Integers) -> Tensor:
        """Samples before standardisation, (samples, channels, ...), float32."""

    @abstractmethod
    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        """Mean and deviation of each channel of these samples."""

    def _targets(self, which: Integers) -> Tensor:
        return torch.from_numpy(self._labels[which].astype(numpy.int64))

    def _standardise(self) -> None:
        statistics = self._statistics(numpy.asarray(self._numbers))
        self._mean, self._deviation = (torch.as_tensor(each, dtype=torch.float32) for each in statistics)


class ScaledArrays(StandardisedSamples):
    """Samples in an array (samples, channels, ...), which are scaled to ``shape``."""

    scaling: ClassVar[Mapping[str, Any]]  # arguments of torch's interpolate()

    def __init__(self, array: NDArray[Any], labels: NDArray[Any], shape: tuple[int, ...], seed: int) -> None:
        self._array, self._shape = array, shape
        super().__init__(labels, array.shape[1], int(labels.max()) + 1, seed)

    def _samples(self, which: Integers) -> Tensor:
        samples = torch.from_numpy(self._array[which].astype(numpy.float32))
        if samples.shape[2:] != self._shape:
            samples = functional.interpolate(samples, self._shape, align_corners=False, **self.scaling)
        return samples

    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        return channel_statistics(self._array, which)


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
