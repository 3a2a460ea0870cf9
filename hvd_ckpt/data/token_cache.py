"""Encoded text as a file that is memory-mapped, written once and found again.

It is a NumPy array file (.npy) with a checksum of four bytes after the tokens, named after what it was made from. It is written
under a temporary name and renamed, so that several processes may make it at once. One that was cut short or damaged is made anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.lib import format as npy
from numpy.typing import NDArray

from hvd_ckpt import folders
from hvd_ckpt.data.array_files import BROKEN

__all__ = ["cache_folder", "cache_key", "obtain"]

VERSION = 2  # of how text becomes tokens; raise it when that changes, so that old files are not found
SUM = 4  # bytes of the checksum
STRETCH = 1 << 20  # tokens


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/hvd_ckpt/tokens``, or ``~/.cache/hvd_ckpt/tokens``; without a home folder, one in the Python environment.

    Raises:
        ValueError: none can be written to.
    """
    try:
        return folders.cache_folder()[0] / "tokens"
    except OSError as error:
        raise ValueError(f"there is no folder to keep tokens in: {error}") from None


def cache_key(files: Sequence[Path], encoder: str) -> str:
    """A name for the tokens of these files: of their paths, sizes and times of change, and of the encoder."""
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([VERSION, encoder, about]).encode()).hexdigest()[:32]


def obtain(
    path: Path, dtype: numpy.dtype[Any], pieces: Iterator[NDArray[Any]], least: int = 0
) -> NDArray[Any]:
    """The tokens in a cache file, memory-mapped; where it is not there whole, it is first made of the pieces.

    Args:
        least: bytes that it will take; it is not begun where the disk has not as many.

    Raises:
        ValueError: the cache cannot be written; one sentence.
    """
    found = _read(path, dtype)
    if found is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if least > free:
                raise OSError(errno.ENOSPC, f"it takes {least >> 20} MiB, and {free >> 20} MiB are free")
            _write(path, dtype, pieces)
        except OSError as error:
            raise ValueError(
                f"cannot write the token cache '{path}': {error.strerror}: "
                "name a folder that can be written with XDG_CACHE_HOME"
            ) from None
        found = _read(path, dtype)
    if found is None:
        raise ValueError(f"the token cache '{path}' is not there whole after it was written: try again")
    return found


def _read(path: Path, dtype: numpy.dtype[Any]) -> NDArray[Any] | None:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        found = npy.open_memmap(path, mode="r")
        if found.dtype != dtype or found.ndim != 1:
            return None
        end = found.offset + found.nbytes
        with path.open("rb") as file:
            file.seek(end)
            checksum = file.read(SUM + 1)
    except (OSError, *BROKEN):  # what is not there, cut short, or has another header
        return None
    tokens = found.view(numpy.ndarray)
    return tokens if checksum == _checksum([tokens]) else None


def _checksum(pieces: Iterable[NDArray[Any]], before: int = 0) -> bytes:
    """Of tokens as they lie in the file. It finds damage, at about 1 GB a second."""
    for piece in pieces:
        for start in range(0, len(piece), STRETCH):
            before = zlib.crc32(piece[start : start + STRETCH].data, before)
    return before.to_bytes(SUM, "little")


def _write(path: Path, dtype: numpy.dtype[Any], pieces: Iterator[NDArray[Any]]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            length = 0
            _write_header(file, dtype, length)
            checksum = bytes(SUM)
            for piece in pieces:
                tokens = numpy.ascontiguousarray(piece, dtype)
                file.write(tokens.data)
                length += len(tokens)
                checksum = _checksum([tokens], int.from_bytes(checksum, "little"))
            file.write(checksum)
            file.seek(0)
            _write_header(file, dtype, length)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _write_header(file: IO[bytes], dtype: numpy.dtype[Any], length: int) -> None:
    # NumPy pads the header so that the first dimension can grow in place.
    about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    npy.write_array_header_1_0(file, about)
