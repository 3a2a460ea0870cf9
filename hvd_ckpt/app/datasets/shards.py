"""Token ids from files of other tools: NumPy files or raw ids, which are memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from hvd_ckpt.app.datasets.tokens import (
    Tokens,
    cache_folder,
    find_text_files,
    key_of,
    number_of_tokens,
    read_tokenizer,
)
from hvd_ckpt.utils.text import one_line

SUFFIXES = frozenset({".bin", ".npy"})
STRETCH = 1 << 22  # number of ids that are checked at a time
HEADER = 256  # 32-bit numbers before the ids in llm.c's files: the first is one of MAGIC, the third the number of ids
MAGIC = {20240520: "uint16", 20240801: "uint32"}
INDEX = b"MMIDIDX\x00\x00"  # Megatron's: begins the .idx file beside a .bin file, before a version of 8 bytes and the type
OF_INDEX = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}


class Shards(Tokens):
    """Token ids of files, concatenated to one text without separators.

    A ``.npy`` file has an array (ids,) of integers. Any other file consists of little-endian numbers, whose type is in the header
    of llm.c's files and in the ``.idx`` file beside Megatron's, and is else ``token_type``, such as uint16 for the files of
    nanoGPT's ``prepare.py``. Files are memory-mapped, and read once to find ids that are not in the vocabulary. A file in the cache
    folder avoids this check while the paths, sizes and modification times of the files are unchanged.

    Args:
        source: a file, or a folder whose ``.bin`` and ``.npy`` files at any depth are used, sorted by path.
        tokenizer: the JSON file of the ``tokenizers`` library with which the ids were made, for the vocabulary and special tokens.
        vocabulary: number of ids; by default that of the tokenizer.
        token_type: the type of the numbers in files other than ``.npy``, one of :data:`hvd_ckpt.utils.text.TOKEN_TYPES`.

    Attributes are those of :class:`Tokens`.

    Raises:
        ValueError: the vocabulary is unknown, a file is missing, unreadable, empty or invalid, an id is not in the vocabulary, or
            the type of ids is unknown or another one. The message is one sentence.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        vocabulary: int | None = None,
        token_type: str | None = None,
    ) -> None:
        known = None if tokenizer is None else read_tokenizer(Path(tokenizer))[0]
        if vocabulary is not None:
            self.ordinary = vocabulary
        elif known is not None and tokenizer is not None:
            self.ordinary = number_of_tokens(known, tokenizer)
        else:
            raise ValueError(
                f"tokens '{source}': the number of token ids is unknown: give vocabulary=N, or put the tokenizer.json beside them"
            )
        self._number_special(known)
        files = find_text_files(source, SUFFIXES)
        arrays = [_open(file, token_type) for file in files]
        key = key_of(files, f"{token_type} ids below {self.ordinary}")
        checked = cache_folder() / f"{key}.checked"
        if not checked.is_file():
            for file, array in zip(files, arrays):
                _check(file, array, self.ordinary)
            try:
                checked.parent.mkdir(parents=True, exist_ok=True)
                checked.touch()
            except OSError:
                pass  # the next run checks again
        joined: Any = arrays[0] if len(arrays) == 1 else _Joined(arrays)
        self.array = joined


class _Joined:
    """Concatenated arrays, which are indexed by an array of positions."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays
        self._ends = numpy.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        # Arrays of 3 and 2 ids have the ends 3 and 5: position 2 is in array 0, and position 3, an end itself, in array 1.
        which = numpy.searchsorted(self._ends, positions, side="right")
        values = numpy.empty(positions.shape, dtype=numpy.int64)
        for number in numpy.unique(which).tolist():
            array, here = self._arrays[number], which == number
            values[here] = array[positions[here] - (self._ends[number] - len(array))]
        return values


def _open(file: Path, token_type: str | None) -> NDArray[Any]:
    """The ids of a file."""
    try:
        if file.suffix.lower() != ".npy":
            stated, start = _stated_type(file)
            if token_type is None and stated is None:
                raise ValueError(
                    "nothing states the type of its ids: give type=uint16, as nanoGPT writes them, or another one"
                )
            kind = numpy.dtype(token_type or stated).newbyteorder("<")
            if stated is not None and numpy.dtype(stated).itemsize != kind.itemsize:
                raise ValueError(f"its ids are {stated}, not {token_type}: leave type out")
            if (file.stat().st_size - start) % kind.itemsize:
                raise ValueError(
                    f"its size is not a multiple of {kind.itemsize} bytes, which a {kind.name} id takes"
                )
            array = numpy.memmap(file, dtype=kind, mode="r", offset=start)
        else:
            array = numpy.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, numpy.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            shape, kind = getattr(array, "shape", None), getattr(array, "dtype", "unknown type")
            raise ValueError(f"it holds {kind} of shape {shape}, give integers of one dimension")
        if not len(array):
            raise ValueError("it is empty")
    except Exception as error:  # NumPy raises nearly anything for a damaged file
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(str(error))
        raise ValueError(f"cannot use the token ids in '{file}': {reason}") from None
    return array.view(numpy.ndarray)


def _stated_type(file: Path) -> tuple[str | None, int]:
    """The type of ids that a file's header or index states, and the bytes before the ids."""
    header = numpy.fromfile(file, "<i4", HEADER)
    if len(header) == HEADER and int(header[0]) in MAGIC:
        stated = MAGIC[int(header[0])]
        there = (file.stat().st_size - header.nbytes) // numpy.dtype(stated).itemsize
        if there != header[2]:
            raise ValueError(f"its header states {header[2]} ids and it has {there}: write it again")
        return stated, header.nbytes
    index = file.with_suffix(".idx")
    if index.is_file():
        with index.open("rb") as stream:
            start = stream.read(len(INDEX) + 9)
        if start.startswith(INDEX):
            code = start[-1] if len(start) == len(INDEX) + 9 else 0
            if code not in OF_INDEX:
                raise ValueError(f"'{index}' states a type of number {code}, which is not one of ids")
            return OF_INDEX[code], 0
    return None, 0


def _check(file: Path, array: NDArray[Any], vocabulary: int) -> None:
    limits = numpy.iinfo(array.dtype)
    # No id of this type can be wrong, so the file is not read.
    if limits.min >= 0 and limits.max < vocabulary:
        return
    for first in range(0, len(array), STRETCH):
        some = array[first : first + STRETCH]
        if some.min() < 0 or some.max() >= vocabulary:
            at = int(((some < 0) | (some >= vocabulary)).argmax())
            raise ValueError(
                f"the file '{file}' has the token id {some[at]} at position {first + at}, and the vocabulary has {vocabulary}: "
                "give the tokenizer or the vocabulary that it was written with"
            )
