"""State as plain values and tensors: validated, copied to host memory, and saved in files that execute nothing when loaded.

A *state dict* here is any nesting of dict, list, tuple, str, int, float, bool, None and dense tensors. Its file is that of
``torch.save``, read with ``torch.load(weights_only=True)``; tensors alone are safetensors files.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import weakref
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Buffer

from hvd_ckpt.snapshots.schema import DAMAGED, FileEntry
from hvd_ckpt.utils.schema import Wrong
from hvd_ckpt.utils.torch_private import foreach_copy_

CHUNK = 1 << 20  # bytes hashed while they are in the CPU's cache
MAPPED_BYTES = 8 << 20
MAX_DEPTH = 100
MAX_NAMED = 30  # steps of the place of a fault that a message names
MAX_INT_BITS = 2000  # the unpickler that executes nothing reads no larger ones
_KEYS = "a text, an integer, a float, a bool, None, or a tuple of these"
_PLAIN = (type(None), bool, float, str)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


# ------------------------------------------------------------------------------------ state dicts


def map_tensors(value: Any, place: str, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a state dict, with each tensor replaced by what ``function(tensor)`` returns.

    NumPy scalars become Python's, and an OrderedDict or Counter a dict, as none loads without its library's classes. Raises Wrong
    if it contains something else, or is nested more than 100 deep; the text begins with ``place``. ``function`` may raise Wrong,
    with a text that follows on the tensor's place.
    """
    try:
        return _mapped(value, function, 0, {})
    except Wrong as error:
        raise Wrong(f"{place}{error}") from None


def _mapped(
    value: Any, function: Callable[[Tensor], Tensor], depth: int, copied: dict[int, tuple[Any, Any]]
) -> Any:
    """As :func:`map_tensors`; ``copied`` has containers with their copies."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if _is_plain(value):
        return value
    if kind is int:
        raise Wrong(f" has {value.bit_length()} bits: store integers of at most {MAX_INT_BITS}")
    if depth == MAX_DEPTH:
        raise Wrong(f"... is nested more than {MAX_DEPTH} deep, or within itself: store it flat")
    if id(value) in copied:
        return copied[id(value)][1]
    if kind in (dict, OrderedDict, Counter):
        for key in value:
            if not _is_key(key):
                raise Wrong(
                    f" has the key {ascii(key)[:60]} of {type(key).__name__}, and a key must be {_KEYS}"
                )
        items = value.items()
    elif kind in (list, tuple):
        items = enumerate(value)
    else:
        way_out = "a tensor" if kind is np.ndarray else "numbers, texts, lists, dicts or tensors"
        raise Wrong(
            f" is a {kind.__module__}.{kind.__qualname__}, which snapshots do not hold: store {way_out}"
        )
    result: Any = dict(items)
    for key, item in result.items():
        if not _is_plain(item):
            try:
                result[key] = _mapped(item, function, depth + 1, copied)
            except Wrong as error:
                step = f"[{key}]" if kind in (list, tuple) else _entry(key)
                raise Wrong(f"{step if depth < MAX_NAMED else ''}{error}") from None
    result = result if kind not in (list, tuple) else kind(result.values())
    copied[id(value)] = value, result  # with the value, or its number could become another one's
    return result


def not_stored(tensor: Tensor) -> str:
    """Why snapshots do not hold a tensor, as a text that follows on its place; an empty one if they do: it is plain, dense, and has
    values."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return (
            f" is a {type(tensor).__name__}, and snapshots hold plain tensors: store the plain tensor in it"
        )
    if tensor.is_meta:
        return " is on the device 'meta', where tensors have no values: store one that has"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return " is a sparse, quantized or nested tensor: store tensor.to_dense(), or its parts"
    return ""


def stored(tensor: Tensor) -> Tensor:
    """The tensor. For :func:`map_tensors`: raises Wrong unless snapshots hold such tensors."""
    reason = not_stored(tensor)
    if reason:
        raise Wrong(reason)
    return tensor


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is int and value.bit_length() <= MAX_INT_BITS)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or type(key) in (str, int, float, bool)


def _entry(key: Any) -> str:
    plain = (
        isinstance(key, str) and 0 < len(key) < 60 and key.replace(".", "_").replace("-", "_").isidentifier()
    )
    return f".{key}" if plain else f"[{ascii(key)[:60]}]"


# ------------------------------------------------------------------------------------ copies in host memory


class Staging:
    """Copies of one snapshot's tensors in host memory, some made at once, the others by a thread while their tensors do not change.

    The memory is used again for the next snapshot: getting fresh pages costs more than the copying. Copies of CUDA tensors are in
    pinned memory. Those that are made at once use the current stream, which changes nothing before they are complete. The others
    use a separate stream, concurrently with training.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Tensor]] = []  # with what they are copies of
        self.restart()

    def restart(self) -> None:
        """Begins the next snapshot: the copies handed out so far are used again."""
        self._used = 0
        self._now: list[tuple[Tensor, Tensor]] = []
        self._later: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._ready: dict[torch.device, torch.cuda.Event] = {}

    def copy_of(self, tensor: Tensor, at_once: bool = False) -> Tensor:
        """A tensor on the CPU, with the same strides, that gets the values of this one in :meth:`run`, or ``at_once`` in
        :meth:`start`, after which the tensor may change. For :func:`map_tensors`: raises Wrong if there is no memory for it."""
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda)
        # A run's snapshots have the same state in the same order. From the first tensor that differs on, copies are made anew.
        if self._used == len(self._copies) or self._copies[self._used][0] != layout:
            del self._copies[self._used :]
            try:
                # A tensor that is made in inference mode could not be written outside of it, in the next snapshot.
                with torch.inference_mode(False):
                    copy = torch.empty_like(
                        tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
                    )
            except RuntimeError as error:
                size, reason = tensor.nbytes >> 20, str(error).splitlines()[0][:200]
                raise Wrong(
                    f": there is no memory for a copy of its {size} MiB ({reason}): let snapshots be blocking"
                ) from None
            self._copies.append((layout, copy))
        copy = self._copies[self._used][1]
        self._used += 1
        (self._now if at_once else self._later).append((tensor, copy))
        return copy

    def start(self) -> None:
        """Makes the copies that are made at once. The other tensors must stay as they are until :meth:`run` has returned."""
        self._versions = _versions(self._later)
        _copy(self._now)
        devices = {source.device for source, _ in (*self._now, *self._later) if source.is_cuda}
        # Behind the last update in the stream: the thread's stream waits for it before it reads the tensors.
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def run(self) -> None:
        """Makes the other copies, and drops the tensors; all copies are complete when this returns. Raises Wrong if a tensor was
        changed meanwhile."""
        later, versions, ready_on = self._later, self._versions, self._ready
        self.restart()
        streams = [torch.cuda.Stream(device) for device in ready_on]  # type: ignore[no-untyped-call]
        for stream, ready in zip(streams, ready_on.values()):
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                _copy([pair for pair in later if pair[0].device == stream.device])
        _copy([pair for pair in later if not pair[0].is_cuda])
        for stream in streams:
            stream.synchronize()
        if _versions(later) != versions:
            raise Wrong(
                "weights or optimizer state were changed while they were copied: call before_update() of the Snapshots before you "
                "change them, or let snapshots be blocking"
            )


def _versions(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    return [0 if source.is_inference() else source._version for source, _ in pairs]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies in one call, which leaves Python to other threads; from a CUDA device in its current stream, without waiting."""
    if pairs:
        with torch.no_grad():
            foreach_copy_([copy for _, copy in pairs], [source for source, _ in pairs], non_blocking=True)


# ------------------------------------------------------------------------------------ files


def save_state(path: Path, state: Any) -> FileEntry:
    """Writes a state dict that :func:`map_tensors` has passed; as :func:`save_bytes`."""
    content = io.BytesIO()
    # What torch.save writes of a tensor is all memory that it is a view of.
    torch.save(map_tensors(state, "state", _alone), content)
    return save_bytes(path, content.getbuffer())


def save_bytes(path: Path, content: Buffer) -> FileEntry:
    """Writes a file, which is on the disk when this returns. Raises OSError if it exists, or cannot be written."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(bytes=file.tell(), sha256=hashlib.sha256(content).hexdigest())


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Writes tensors as a safetensors file; it is on the disk when this returns. Raises Wrong if the format does not hold one of
    them, OSError if the file cannot be written."""
    plain = {name: _values(tensor).contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:  # the library refuses tensors that share memory
            plain[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.numel() * tensor.itemsize)
    try:
        safetensors.torch.save_file(plain, path, {"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise Wrong(f"tensors cannot be stored: {error}") from None
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    except (KeyError, ValueError) as error:
        raise Wrong(
            f"tensors cannot be stored ({error}): store them in types of numbers that safetensors has"
        ) from None
    with open(path, "rb") as file:
        # safetensors does not flush what it writes. A descriptor for reading flushes the file, too.
        os.fsync(file.fileno())
    return hash_file(path)


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file. Raises OSError if it cannot be read, or is a link."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK))
    # Follows no link, and does not wait for a writer if a FIFO has the file's name.
    with open(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0
    ) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def load_state(path: Path) -> Any:
    """The state dict in a file, with its tensors on the CPU; nothing in it is executed. Raises Wrong if it is not a file that
    :func:`save_state` writes, OSError if it cannot be read."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save compresses nothing, and a few compressed bytes could expand to more than there is memory.
            if any(
                entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size
                for entry in archive.infolist()
            ):
                raise Wrong(f"it is compressed: {DAMAGED}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (Wrong, OSError):
        raise
    except Exception as error:  # whatever the two readers stumble over
        reason = " ".join(str(error).split())[:100]
        raise Wrong(f"it is not a state dict ({type(error).__name__}: {reason}): {DAMAGED}") from None

    def checked(tensor: Tensor) -> Tensor:
        # A file may say that a tensor reaches beyond its storage, or that the storage is larger than the file is.
        storage = stored(tensor).untyped_storage().nbytes()
        if tensor.numel() * tensor.itemsize > storage or storage > size:
            raise Wrong(" has more elements than the file has room for")
        return _with_bools(tensor).detach()

    try:
        return map_tensors(state, "it", checked)
    except Wrong as error:
        raise Wrong(f"{error}: {DAMAGED}") from None


class TensorFile:
    """A safetensors file. It is mapped, and after 8 MiB mapped anew: what was read of a map counts as memory of the process.

    Raises Wrong if it is not a safetensors file, OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        # All maps are of this file, also if another one gets its name.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._path = f"/dev/fd/{descriptor}"
        self._map()

    def _map(self) -> None:
        self._read = 0
        try:
            self._file: Any = safe_open(self._path, "pt")
        except OSError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise Wrong(
                f"it is not a safetensors file ({type(error).__name__}: {reason}): {DAMAGED}"
            ) from None

    def names(self) -> set[str]:
        """The names of its tensors."""
        return set(self._file.keys())

    def form(self, name: str) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of a tensor."""
        tensor = self._file.get_tensor(name)
        return list(tensor.shape), tensor.dtype

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """A slice of a tensor along its first dimension, by default all of it; not to be changed."""
        if self._read > MAPPED_BYTES:
            self._map()
        values: Tensor = self._file.get_tensor(name)
        values = values if start is None else values[start:stop]
        self._read += values.nbytes
        checked: Tensor = map_tensors(values, f"it{_entry(name)}", _with_bools)
        return checked


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu()


def _alone(tensor: Tensor) -> Tensor:
    """The same values in a storage of exactly their size."""
    tensor = _values(tensor)
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize else tensor.clone()


def _with_bools(tensor: Tensor) -> Tensor:
    """The tensor. Raises Wrong if it has other bools than true and false."""
    if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise Wrong(f" has bools that are neither true nor false: {DAMAGED}")
    return tensor
