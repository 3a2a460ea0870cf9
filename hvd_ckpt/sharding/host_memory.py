"""Memory for what is not needed all the time: files mapped into memory, or pinned memory beside a CUDA device.

A mapped page that nobody has touched lately can leave memory at any time, so the files may be larger than it. They have no name:
when the process ends, however it ends, they are gone.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hvd_ckpt.text import show_bytes

if TYPE_CHECKING:
    from hvd_ckpt.sharding.exchange import Exchange

__all__ = ["HostMemory", "MappedFiles", "OffloadError", "PinnedMemory", "raised_everywhere"]

_ALIGNMENT = 64  # bytes
_IN_MEMORY = ("tmpfs", "ramfs")

Wanted = tuple[int, torch.dtype]  # number of elements, dtype


class OffloadError(OSError):
    """Not enough room for the offloaded state. Nothing has changed: with more room the same step can be taken."""


class HostMemory(Protocol):
    """Where offloaded tensors are."""

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Tensors of zeros, 1-D: all of them or none.

        Raises:
            OffloadError: there is no room for them.
        """
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        ...

    def prefetch(self, tensor: torch.Tensor) -> None:
        """Starts to read what will be used soon."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Lets the part of a tensor that lies here leave memory; its values stay."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all that is held."""
        ...


class _Mapping(NamedTuple):
    address: int
    nbytes: int
    memory: weakref.ref[mmap.mmap]  # its tensors keep it


class MappedFiles:
    """Unlinked files of a folder, mapped into memory.

    Args:
        folder: where; by default the temporary folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._mappings: list[_Mapping] = []
        kind = _filesystem(self.folder)
        if kind in _IN_MEMORY:
            warnings.warn(
                f"the folder for offloaded optimizer state, '{self.folder}', is itself in memory ({kind}), so nothing is saved: "
                f"name one on a disk (offload_folder=, hvd-ckpt train --offload-folder)",
                stacklevel=2,
            )

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        offsets, size = [], 0
        for numel, dtype in wanted:
            offsets.append(size)
            size += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return [torch.empty(0, dtype=dtype) for _, dtype in wanted]
        memory = self._map(size)
        tensors = [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
            if numel
            else torch.empty(0, dtype=dtype)
            for (numel, dtype), offset in zip(wanted, offsets)
        ]
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._mappings = sorted([*self._live(), _Mapping(address, size, weakref.ref(memory))])
        return tensors

    def _map(self, size: int) -> mmap.mmap:
        """Zeros, whose room on the disk is taken before any is written: running out later would kill the process."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise _no_room(self.folder, size, error) from error

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._find(tensor) is not None

    def prefetch(self, tensor: torch.Tensor) -> None:
        self._advise(tensor, mmap.MADV_WILLNEED)

    def release(self, tensor: torch.Tensor) -> None:
        self._advise(tensor, mmap.MADV_DONTNEED)  # shared pages: they stay in the page cache, or in the file

    @property
    def nbytes(self) -> int:
        return sum(mapping.nbytes for mapping in self._live())

    def _live(self) -> list[_Mapping]:
        return [mapping for mapping in self._mappings if mapping.memory() is not None]

    def _find(self, tensor: torch.Tensor) -> tuple[mmap.mmap, int] | None:
        """The mapping that a tensor lies in, and where."""
        position = bisect.bisect(self._mappings, tensor.data_ptr(), key=lambda mapping: mapping.address)
        address, nbytes, reference = self._mappings[position - 1] if position else (0, 0, None)
        offset = tensor.data_ptr() - address
        memory = reference() if reference is not None and offset < nbytes else None
        return None if memory is None else (memory, offset)

    def _advise(self, tensor: torch.Tensor, advice: int) -> None:
        found = self._find(tensor)
        if found is None:
            return
        memory, start = found
        stop = start + tensor.numel() * tensor.element_size()
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        memory.madvise(advice, first, stop - first)


class PinnedMemory:
    """Page-locked memory, which a CUDA device copies from and to beside its other work."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[torch.Tensor]] = []

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        tensors = []
        try:
            for numel, dtype in wanted:
                tensors.append(torch.zeros(numel, dtype=dtype, pin_memory=True))
        except RuntimeError as error:
            size = sum(numel * dtype.itemsize for numel, dtype in wanted)
            reason = str(error).splitlines()[0]
            raise OffloadError(
                f"cannot offload optimizer state: {show_bytes(size)} of pinned memory are needed ({reason}): free host "
                f"memory, split over more ranks, or do not offload"
            ) from error
        self._held.extend(map(weakref.ref, tensors))
        return tensors

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def prefetch(self, tensor: torch.Tensor) -> None:
        pass

    def release(self, tensor: torch.Tensor) -> None:
        pass

    @property
    def nbytes(self) -> int:
        held = [reference() for reference in self._held]
        return sum(tensor.nbytes for tensor in held if tensor is not None)


@contextmanager
def raised_everywhere(exchange: Exchange) -> Iterator[None]:
    """Makes an OffloadError of one rank an error on every rank. Collective.

    Raises:
        OffloadError, ValueError: the rank's own, or an OffloadError that points to the other rank.
    """
    error: Exception | None = None
    try:
        yield
    except (OffloadError, ValueError) as found:
        error = found
    if exchange.maximum(torch.tensor([float(error is not None)]), "room")[0] > 0:
        raise error or OffloadError(
            "another rank cannot offload its part of the optimizer's state: its message says why; nothing has changed, so the "
            "step can be taken again"
        )


def _no_room(folder: Path, size: int, error: OSError) -> OffloadError:
    reason = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        reason = "the limit on the size of a file, ulimit -f, is lower"
    try:
        status = os.statvfs(folder)
        free = f", {show_bytes(status.f_bavail * status.f_frsize)} are free"
    except OSError:
        free = ""
    found = OffloadError(
        f"cannot offload optimizer state to the folder '{folder}' ({reason}): {show_bytes(size)} are needed{free}; make room, or "
        f"name another folder (offload_folder=, hvd-ckpt train --offload-folder); nothing has changed, so the step can be taken "
        f"again"
    )
    found.errno = error.errno
    return found


def _filesystem(folder: Path) -> str:
    """The kind of file system that a folder is on, as /proc names it; empty if it does not say."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                _, point, found, *_ = line.split(" ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, found
    except (OSError, ValueError):
        return ""
    return kind
