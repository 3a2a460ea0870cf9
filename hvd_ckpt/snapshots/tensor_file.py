"""Tensors as safetensors files (https://github.com/huggingface/safetensors), which every tool that knows the format can read.

The safetensors library would have all tensors of a GPU in main memory at once, and its files would be read a second time to be
hashed. Here one tensor at a time is fetched, hashed and written, without a copy where it is contiguous on the CPU; what is read
is checked on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from hvd_ckpt.json_file import Wrong, loads, shown
from hvd_ckpt.snapshots.hashed_file import DAMAGED, HashedReader, HashedWriter

__all__ = [
    "Cut",
    "Kind",
    "check_tensor",
    "checked_entries",
    "dtype_called",
    "entry_of",
    "header_of",
    "read_tensors",
    "write_tensors",
]

Cut = Callable[[str, list[int]], tuple[int, int] | None]

MAX_HEADER = 64 << 20  # bytes

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_DTYPES = {name: getattr(torch, dtype) for name, dtype in _NAMES.items() if hasattr(torch, dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# What the format has no name for is written as pairs of another dtype, with a note under the tensor's name in the metadata.
_PAIRS = {"complex128": torch.float64, "complex32": torch.float16}
_NOTE = "dtype of "


def dtype_called(name: str) -> torch.dtype | None:
    """The dtype of a name such as "float32", if files hold tensors of it."""
    dtype = getattr(torch, name, None)
    known = isinstance(dtype, torch.dtype) and (dtype in _DTYPE_NAMES or name in _PAIRS)
    return dtype if known else None


def check_tensor(tensor: Tensor) -> str | None:
    """Why a tensor cannot be written; None if it can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return (
            f"is a {type(tensor).__name__}, and only plain tensors are stored: store the plain tensor in it"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return "is a sparse, quantized or nested tensor: store tensor.to_dense(), or its parts"
    if tensor.is_meta:
        return "is on the device 'meta', where tensors have no values: store one that has"
    if tensor.dtype not in _DTYPE_NAMES and _short(tensor.dtype) not in _PAIRS:
        return f"is of {tensor.dtype}, which no file holds: store tensor.view(torch.uint8)"
    return None


class Kind(NamedTuple):
    """A tensor of a file: its dtype, that in which it is stored, its shape, and its bytes, counted from the first tensor's."""

    dtype: torch.dtype
    stored: torch.dtype
    shape: list[int]
    start: int
    stop: int

    @classmethod
    def of(cls, dtype: torch.dtype, shape: list[int]) -> Kind:
        """Of a tensor that is the first in its file."""
        return cls(dtype, _stored_dtype(dtype), shape, 0, math.prod(shape) * dtype.itemsize)


def entry_of(name: str, kind: Kind, position: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The entry in a header of a tensor that begins at ``position``, and what its metadata say of it."""
    end = position + kind.stop - kind.start
    entry = {
        "dtype": _DTYPE_NAMES[kind.stored],
        "shape": kind.shape + [2] * (kind.stored != kind.dtype),
        "data_offsets": [position, end],
    }
    return entry, {_NOTE + name: _short(kind.dtype)} if kind.stored != kind.dtype else {}


def header_of(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file, up to its first tensor.

    Raises:
        Wrong: it is larger than it may be.
    """
    text = json.dumps({"__metadata__": dict(metadata), **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise Wrong(
            f"the names of {len(entries)} tensors do not fit in a header of {MAX_HEADER >> 20} MiB: store fewer"
        )
    return len(text).to_bytes(8, "little") + text


def write_tensors(tensors: Mapping[str, Tensor], file: HashedWriter) -> None:
    """Writes tensors, each of which :func:`check_tensor` has passed.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    metadata = {"format": "pt"}
    # Falling item sizes keep every tensor aligned, so that others can map the file into memory.
    names = sorted(tensors, key=lambda name: -_stored_dtype(tensors[name].dtype).itemsize)
    position = 0
    for name in names:
        kind = Kind.of(tensors[name].dtype, list(tensors[name].shape))
        header[name], note = entry_of(name, kind, position)
        metadata.update(note)
        position += kind.stop
    file.write(header_of(header, metadata))
    for name in names:
        file.write(_buffer(tensors[name].detach().resolve_conj().resolve_neg().to("cpu").contiguous()))


def read_tensors(file: HashedReader, cut: Cut | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU; the whole file is read and checked.

    Args:
        cut: takes a tensor's name and shape, and gives the elements to keep of one with one dimension, as start and stop; None for
            all of it.

    Raises:
        Wrong: it is damaged, or no file that :func:`write_tensors` wrote.
        OSError: it cannot be read.
    """
    if cut is None and file.left > (memory := psutil.virtual_memory().total):
        raise Wrong(
            f"its {file.left >> 20} MiB are more than the {memory >> 20} MiB of memory here: {DAMAGED}"
        )
    tensors: dict[str, Tensor] = {}
    for name, kind in checked_entries(file).items():
        start, stop = 0, math.prod(kind.shape)
        kept = None if cut is None or len(kind.shape) != 1 else cut(name, kind.shape)
        if kept is not None:
            start, stop = kept
        try:
            tensor = torch.empty(kind.shape if kept is None else [stop - start], dtype=kind.dtype)
        except (RuntimeError, TypeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            raise Wrong(f"there is no room for its tensor {shown(name)} ({reason}): {DAMAGED}") from None
        file.skip(start * kind.dtype.itemsize)
        file.fill(_buffer(tensor))
        file.skip(kind.stop - kind.start - stop * kind.dtype.itemsize)
        if kind.stored == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise _wrong(f"its tensor {shown(name)} has truth values that are neither true nor false")
        tensors[name] = tensor
    file.check()
    return tensors


def checked_entries(file: HashedReader) -> dict[str, Kind]:
    """The tensors of a file, which are read next, one after the other and without gaps.

    Raises:
        Wrong: its header is none, or does not fit its size.
        OSError: it cannot be read.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER, file.left):
        raise _wrong("its header is longer than it may be")
    header = loads(file.read(length), DAMAGED, DAMAGED)
    if not isinstance(header, dict):
        raise _wrong("its header is no object")
    notes = header.pop("__metadata__", None)
    if not isinstance(notes, dict):
        raise _wrong("its header has no metadata")
    kinds: dict[str, Kind] = {}
    position = 0
    for name, entry in header.items():
        kinds[name] = _checked_entry(name, entry, notes.get(_NOTE + name), position, file.left)
        position = kinds[name].stop
    if position != file.left:
        raise _wrong("it has bytes that belong to no tensor")
    return kinds


def _checked_entry(name: str, entry: Any, note: Any, position: int, size: int) -> Kind:
    """An entry that must begin at ``position``, in a file with ``size`` bytes of tensors."""
    place = f"the entry of {shown(name)} in its header"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(f"{place} is none of a tensor")
    shape, offsets, stored = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(stored, str) or stored not in _DTYPES:
        raise _wrong(f"{place} has the dtype {shown(stored)}, which this version of PyTorch does not have")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _wrong(f"{place} has a shape or an offset that is none")
    if offsets[0] != position or not position <= offsets[1] <= size:
        raise _wrong(f"{place} has the offsets {offsets[0]} and {offsets[1]}, which is not its place")
    stored_dtype: torch.dtype = _DTYPES[stored]
    if math.prod(shape) * stored_dtype.itemsize != offsets[1] - position:
        raise _wrong(f"{place} has a shape of another size than its data")
    if note is None:
        return Kind(stored_dtype, stored_dtype, shape, *offsets)
    if not isinstance(note, str) or _PAIRS.get(note) != stored_dtype or shape[-1:] != [2]:
        raise _wrong(f"{place} has the note {shown(note)}, which does not fit")
    return Kind(getattr(torch, note), stored_dtype, shape[:-1], *offsets)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _DTYPE_NAMES else _PAIRS[_short(dtype)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _buffer(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _wrong(what: str) -> Wrong:
    return Wrong(f"{what}: {DAMAGED}")
