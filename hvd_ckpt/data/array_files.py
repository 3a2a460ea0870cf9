"""Arrays of samples and their labels, in memory or from a NumPy file (.npz)."""

from __future__ import annotations

import lzma
import os
import stat
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy
import psutil
from numpy.typing import NDArray

from hvd_ckpt.names import one_line

__all__ = ["Source", "channel_statistics", "load"]

Source = str | os.PathLike[str] | tuple[NDArray[Any], NDArray[Any]]

# What zipfile, zlib and NumPy raise for what is none of their files.
BROKEN = (
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    EOFError,
    SyntaxError,
    RuntimeError,
    OverflowError,
    MemoryError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
MOST_CLASSES = 1 << 20
LARGEST = 1e30  # beyond it sums of squares are no numbers in float32

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
    if labels.max() >= MOST_CLASSES:
        raise ValueError(
            f"{name}: a label is {labels.max()}, number the classes from 0, below {MOST_CLASSES}"
        )
    if not values.ndim or not labels.ndim or len(labels) != len(values):
        count = len(values) if values.ndim else "no"
        raise ValueError(f"{name}: there are {count} {samples}, but labels are of shape {labels.shape}")
    if values.dtype.kind == "f" and not all(
        (numpy.abs(values[first : first + STRETCH]) <= LARGEST).all()
        for first in range(0, len(values), STRETCH)
    ):
        raise ValueError(f"{name}: {samples} hold numbers that are not finite, or above {LARGEST:g}")
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
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is a folder or a device")
        _check_sizes(path, wanted)
        with numpy.load(path, allow_pickle=False) as file:
            found = [file[key] for key in wanted]
        for key, array in zip(wanted, found):
            if not isinstance(array, numpy.ndarray):
                raise ValueError(f"'{key}' is no array")
        return found
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from None
    except BROKEN as error:
        reason = one_line(str(error)) or type(error).__name__
        # NumPy takes what is none of its files for a pickle.
        if "pickle" in reason.lower():
            reason = "it holds Python objects, which are not loaded, or is no .npz file"
        raise ValueError(
            f"cannot use {name}: {reason}: give an .npz file with {' and '.join(wanted)}"
        ) from None


def _check_sizes(path: Path, wanted: tuple[str, ...]) -> None:
    """A file of a few bytes may unfold to more than a machine can hold."""
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}
    missing = [key for key in wanted if key not in sizes]
    if missing:
        raise ValueError(f"it has no array '{missing[0]}', only {', '.join(sizes)[:200] or 'none'}")
    size, memory = sum(sizes[key] for key in wanted), psutil.virtual_memory().available
    if size > memory:
        raise ValueError(f"its arrays take {size >> 20} MiB, and {memory >> 20} MiB of memory are available")
