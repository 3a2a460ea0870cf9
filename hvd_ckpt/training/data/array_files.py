"""Arrays of samples and their labels, in memory or from a NumPy file (.npz)."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

__all__ = ["Source", "channel_statistics", "load"]

Source = str | os.PathLike[str] | tuple[NDArray[Any], NDArray[Any]]

STRETCH = 1024  # samples looked at together, so that statistics take little memory


def load(source: Source, samples: str) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Samples, their labels, and a name for messages.

    Args:
        source: an .npz file with the arrays ``samples`` and ``labels``, or the two arrays.
        samples: what the samples are called.

    Raises:
        ValueError: the file is missing or no such file; arrays are missing, empty, of unequal length or of a type that is
            no number; labels are not whole numbers from 0. One sentence.
    """
    if isinstance(source, tuple):
        name = "the arrays"
        values, labels = (numpy.asarray(array) for array in source)
    else:
        name = f"the file '{os.fspath(source)}'"
        values, labels = _read(Path(source), name, (samples, "labels"))
    if values.dtype.kind not in "buif":
        raise ValueError(
            f"{name}: {samples} are of type {values.dtype}, give whole or floating-point numbers"
        )
    if not values.size:
        raise ValueError(f"{name}: there are no {samples}, their shape is {values.shape}")
    if labels.dtype.kind not in "bui" or not labels.size or labels.min() < 0:
        raise ValueError(f"{name}: labels must be whole numbers from 0")
    if not labels.ndim or len(labels) != len(values):
        raise ValueError(f"{name}: there are {len(values)} {samples}, but labels are of shape {labels.shape}")
    if values.dtype.kind == "f" and not all(
        numpy.isfinite(values[first : first + STRETCH]).all() for first in range(0, len(values), STRETCH)
    ):
        raise ValueError(f"{name}: {samples} hold numbers that are not finite")
    return values, labels, name


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


def _read(path: Path, name: str, wanted: tuple[str, ...]) -> list[NDArray[Any]]:
    try:
        with numpy.load(path, allow_pickle=False) as file:
            if not isinstance(file, numpy.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            missing = [key for key in wanted if key not in file]
            if missing:
                raise ValueError(f"it has no array '{missing[0]}', only {', '.join(file) or 'none'}")
            return [file[key] for key in wanted]
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        # NumPy takes what is none of its files for a pickle.
        reason = "it is no .npz file" if "pickle" in str(error).lower() else str(error)
        raise ValueError(
            f"cannot use {name}: {reason}: give an .npz file with {' and '.join(wanted)}"
        ) from None
