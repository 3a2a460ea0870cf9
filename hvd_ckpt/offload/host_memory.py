"""Memory for offloaded state: files that are mapped into memory, or pinned host memory for a CUDA device."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.text import show_bytes

_IN_MEMORY = ("tmpfs", "ramfs")
_SMALL_BYTES = 64 << 10
_ALIGNMENT = 64  # bytes

Wanted = tuple[int, torch.dtype]  # number of elements, dtype


class OffloadError(OSError):
    """Not enough room for the offloaded state. Nothing has changed: with more room the same step can be taken."""


class MappedFiles:
    """Files of a folder, mapped into memory, one per tensor.

    A mapped page that nobody has touched lately can leave memory at any time, so the files may be larger than it. They have no
    name and no descriptor: when the process ends, however it ends, they are gone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        # By address.
        self._maps: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        kind = _filesystem(self._folder)
        if kind in _IN_MEMORY:
            run_warnings.warn(
                f"the folder for offloaded state, '{self._folder}', is itself in memory ({kind}), so nothing is saved: "
                f"name one on a disk (offload_folder=, hvd-ckpt train --shard STATES,offload=WHAT,folder=)"
            )

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """1-D tensors of zeros: all of them, or an OffloadError."""
        try:
            return [self._mapped(numel, dtype) for numel, dtype in wanted]
        except OSError as error:
            size = sum(numel * dtype.itemsize for numel, dtype in wanted)
            raise _no_room(self._folder, size, error) from error

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, whose room on the disk is taken before any is written: running out later would kill the process."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
            try:
                # Through its descriptor, since the file has no name. The mapping outlives the
                # descriptor, and the file is gone with it.
                tensor = torch.from_file(
                    f"/proc/self/fd/{file.fileno()}", shared=True, size=numel, dtype=dtype
                )
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, str(error).splitlines()[0]) from error
        self._maps[tensor.data_ptr()] = tensor.untyped_storage()
        return tensor

    def advise(self, tensor: torch.Tensor, soon: bool) -> None:
        """The tensor is used soon, or may leave memory with its values kept."""
        memory = self._maps.get(tensor.data_ptr())
        if memory is not None:
            _advise(memory, mmap.MADV_WILLNEED if soon else mmap.MADV_DONTNEED)

    def release(self) -> None:
        """All of it may leave memory."""
        for memory in list(self._maps.values()):
            _advise(memory, mmap.MADV_DONTNEED)


def _advise(memory: torch.UntypedStorage, advice: int) -> None:
    """Of mapped, shared pages, which stay in the page cache, or in the file."""
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes()), advice)


class PinnedMemory:
    """Page-locked memory, which a CUDA device copies from and to beside its other work; used as :class:`MappedFiles`.

    It is page-locked here and not by PyTorch, whose allocator of pinned memory rounds each size up to a power of two. PyTorch's
    keeps memory that a copy in flight uses; this memory is gone with the last of its tensors, which must outlive their copies.
    """

    def allocate(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        sizes = [-(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for numel, dtype in wanted]
        try:
            memory = _page_locked(sum(sizes)) if any(sizes) else np.empty(0, dtype=np.uint8)
        except (OSError, RuntimeError) as error:
            raise OffloadError(
                f"cannot offload: {show_bytes(sum(sizes))} of pinned memory are needed ({str(error).splitlines()[0]}): "
                f"free host memory, split over more ranks, or do not offload"
            ) from error
        tensors = []
        for (numel, dtype), end, size in zip(wanted, accumulate(sizes), sizes):
            own: Any = memory[end - size : end]
            tensors.append(
                torch.frombuffer(own, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
            )
        return tensors

    def advise(self, tensor: torch.Tensor, soon: bool) -> None:
        pass


def _page_locked(nbytes: int) -> NDArray[np.uint8]:
    """Zeros in pages of their own, which are unlocked when no array or tensor refers to them.

    Raises:
        OSError, RuntimeError: there is no memory, or the limit of page-locked memory is reached.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, dtype=np.uint8)
    address: int = memory.ctypes.data
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(address, len(memory), 0))
    if status:
        raise RuntimeError(f"cudaHostRegister returned error {status}")
    # Slices of the array hold it, so this runs after the last tensor. Not at exit, when CUDA may be gone already.
    weakref.finalize(memory, _unlock, cudart, pages, address).atexit = False
    return memory


def _unlock(cudart: Any, pages: mmap.mmap, address: int) -> None:
    """Has the pages, which are unmapped after it."""
    cudart.cudaHostUnregister(address)


def _no_room(folder: Path, size: int, error: OSError) -> OffloadError:
    reason = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        reason = "the limit on the size of a file, ulimit -f, is lower"
    try:
        free = f", {show_bytes(psutil.disk_usage(str(folder)).free)} are free"
    except OSError:
        free = ""
    refused = OffloadError(
        f"cannot offload to the folder '{folder}' ({reason}): {show_bytes(size)} are needed{free}; make room, or name another "
        f"folder (offload_folder=, hvd-ckpt train --shard STATES,offload=WHAT,folder=); nothing has changed, so you can try again"
    )
    refused.errno = error.errno
    return refused


def _filesystem(folder: Path) -> str:
    """The kind of file system that a folder is on; empty if it is unknown."""
    path = Path(os.path.realpath(folder))
    around = [disk for disk in psutil.disk_partitions(all=True) if path.is_relative_to(disk.mountpoint)]
    return max(around, key=lambda disk: len(disk.mountpoint)).fstype if around else ""


@contextmanager
def init_on_disk(folder: str | Path | None = None) -> Iterator[None]:
    """A context in which parameters of modules that are made on the CPU are in memory-mapped files, which may be larger than
    memory.

    Use it for a model that is then split with ``shard="parameters", offload="parameters"``. The model's own code initializes it.
    The files have no name, and are deleted when the model has been split. Parameters below 64 KiB, lazy parameters, and tensors
    that ``module.to(dtype)`` converts stay in memory.

    A parameter gets its own memory when a module registers (or copies) it. Initialize it after that, as PyTorch's modules do; do
    not initialize the tensor that it was made of. Tie parameters as one object.

    Args:
        folder: a folder on a disk; by default the temporary folder.

    Raises:
        OSError: the disk is full.
    """
    memory = MappedFiles(None if folder is None else Path(folder))
    copied = torch.nn.Parameter.__deepcopy__

    def move(parameter: torch.nn.Parameter | None) -> None:
        if parameter is None or is_lazy(parameter) or parameter.device.type != "cpu":
            return
        if parameter.layout is torch.strided and parameter.nbytes >= _SMALL_BYTES:
            spec = TensorSpec.of(parameter)
            flat = memory.allocate([(spec.numel, parameter.dtype)])[0]
            parameter.data = spec.unflatten(flat.copy_(spec.flatten(parameter)))
            memory.advise(flat, soon=False)

    def copy_and_move(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
        # Copied before, as a tied one is: this returns the same copy, which has been moved already.
        known = id(parameter) in memo
        result = copied(parameter, memo)  # type: ignore[no-untyped-call]
        if not known:
            move(result)
        return result

    handle = register_module_parameter_registration_hook(lambda module, name, parameter: move(parameter))
    torch.nn.Parameter.__deepcopy__ = copy_and_move  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign]
        handle.remove()
        memory.release()  # what initialized them has touched them
