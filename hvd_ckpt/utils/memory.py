"""Peak memory of a piece of work, in exact bytes.

The resident set of a process also counts the interpreter, caches, and pages that the allocator has not returned. This module
counts what PyTorch's own allocators allocate. On CUDA, the caching allocator has statistics. On CPU, the allocator has none, but
it reports each block that it allocates or frees to the profiler. The same work gives the same number in each run.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef

from hvd_ckpt.utils.machine import machine_memory
from hvd_ckpt.utils.text import show_bytes
from hvd_ckpt.utils.torch_private import DeviceType, profiler_enabled

MARK = "hvd_ckpt.mark."  # before the number of a mark, in the names of the profiler's events


@dataclass
class PeakMemory:
    """Memory that a piece of work allocated, above the bytes allocated at its start; printed in MiB or another fitting unit.

    Attributes:
        peak_bytes: the most bytes allocated at a time.
        held_bytes: bytes allocated at the end.
    """

    peak_bytes: int = 0
    held_bytes: int = 0

    def __str__(self) -> str:
        return f"peak {show_bytes(self.peak_bytes)}, held at the end {show_bytes(self.held_bytes)}"


def measure_peak(work: Callable[[], object], device: torch.device | str = "cpu") -> PeakMemory:
    """Calls ``work()`` and returns the exact peak of the memory that it allocates on ``device``.

    The result of ``work`` is freed before the end is measured, so ``held_bytes`` is the memory that the work still holds
    elsewhere. :func:`recording_peak` describes the memory that is counted.
    """
    with recording_peak(device) as memory:
        work()
    return memory


@contextlib.contextmanager
def recording_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """A context that measures its body. The figures are set when the body has ended.

    On CPU, each block that PyTorch allocates in the body counts with its requested size, including workspaces of operators, on the
    calling thread and on autograd's threads. Two kinds of blocks do not count. Blocks that were allocated before the start are not
    counted, and freeing one does not lower the figures, so start where the work starts. Neither are blocks of other threads, such
    as the communication threads of Horovod and Gloo. On CUDA, the figures are ``torch.cuda.max_memory_allocated`` of the device,
    for all threads.

    Raises:
        ValueError: the device is neither CPU nor CUDA.
        RuntimeError: the device is the CPU, and another profiler is running. PyTorch supports one at a time.
    """
    memory = PeakMemory()
    with recording_marks(device) as marks:
        yield memory
        marks.mark("end")
    memory.peak_bytes, memory.held_bytes = marks.marks[-1].peak_bytes, marks.marks[-1].bytes


def memory_since(
    before: dict[int, torch.UntypedStorage], device: str = "cpu"
) -> list[tuple[StorageWeakRef, int]]:
    """The memory of all tensors that Python knows, and that is not one of these, which are kept meanwhile, and its bytes. What lies
    in mapped files does not count."""
    files = mapped_files()
    return [
        (StorageWeakRef(memory), memory.nbytes())  # type: ignore[no-untyped-call]
        for address, memory in memory_of_tensors(device).items()
        if address not in before and not any(address in file for file in files)
    ]


def bytes_alive(memory: Iterable[tuple[StorageWeakRef, int]]) -> int:
    """Bytes of what has not been freed of this memory."""
    alive: list[int] = [nbytes for storage, nbytes in memory if not storage.expired()]  # type: ignore[no-untyped-call]
    return sum(alive)


def mapped_files() -> list[range]:
    """Addresses at which this process has mapped files of a disk."""
    return [
        range(*(int(address, 16) for address in region.addr.split("-")))
        for region in psutil.Process().memory_maps(grouped=False)
        if region.path.startswith("/") and not region.path.startswith("/memfd:")
    ]


def memory_of_tensors(device: str = "cpu") -> dict[int, torch.UntypedStorage]:
    """The memory on this type of device of all tensors that Python knows, by address."""
    gc.collect()
    tensors = (
        value
        for value in gc.get_objects()
        if issubclass(type(value), torch.Tensor) and not hasattr(type(value), "fake_mode")  # of torch.compile
    )
    memories = (_memory_on(device, tensor) for tensor in tensors)
    return {memory.data_ptr(): memory for memory in memories if memory is not None}


def _memory_on(device: str, tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor on this type of device; None for one without an address."""
    try:
        if tensor.device.type == device and tensor.layout is torch.strided:
            memory = tensor.untyped_storage()
            memory.data_ptr()
            return memory
    except (RuntimeError, ValueError):
        # An undefined tensor of autograd has no device, one that torch.compile has traced no address, a lazy parameter no memory.
        pass
    return None


@dataclass(frozen=True)
class Mark:
    """The memory at a mark, in bytes above the start.

    Attributes:
        name: name of the mark.
        bytes: bytes allocated at the mark.
        peak_bytes: the most bytes allocated since the previous mark.
    """

    name: str
    bytes: int
    peak_bytes: int


class Marks:
    """Peaks of the parts of a piece of work, which :func:`recording_marks` records.

    Attributes:
        marks: the marks in order, once the recording has ended.
        timeline: (seconds since the start, bytes above the start) at each change; on CPU only.
    """

    def __init__(self, device: torch.device) -> None:
        self.marks: list[Mark] = []
        self.timeline: list[tuple[float, int]] = []
        self._device = device
        self._names: list[str] = []
        self._start = 0

    def mark(self, name: str) -> None:
        """Ends a part of the work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            now = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self.marks.append(Mark(name, now - self._start, peak - self._start))
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        # The profiler's event has the number of the mark, since names may be repeated.
        self._names.append(name)
        with torch.profiler.record_function(f"{MARK}{len(self._names) - 1}"):
            pass

    def start(self) -> None:
        """Begins to count on a CUDA device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)

    def read(self, results: Any) -> None:
        """Takes what the profiler has seen of the CPU's allocator and of the marks."""
        events = (
            event
            for event in results.events()
            if (event.name() == "[memory]" and event.device_type() == DeviceType.CPU)
            or event.name().startswith(MARK)
        )
        # Events are changes of the allocated bytes (negative for frees) and marks, in order of time. A mark has the bytes at it,
        # and the peak since the previous mark, which starts from the bytes there.
        allocated = peak = 0
        start: int | None = None
        for event in sorted(events, key=lambda event: event.start_ns()):
            start = event.start_ns() if start is None else start
            if event.name() == "[memory]":
                allocated += event.nbytes()
                peak = max(peak, allocated)
                self.timeline.append(((event.start_ns() - start) / 1e9, allocated))
            else:
                name = self._names[int(event.name().removeprefix(MARK))]
                self.marks.append(Mark(name, allocated, peak))
                peak = allocated


@contextlib.contextmanager
def recording_marks(device: torch.device | str = "cpu", kind: type[Marks] = Marks) -> Iterator[Marks]:
    """A context that measures the parts of its body, each of which ends with ``marks.mark(name)``.

    It counts the same memory as :func:`recording_peak`, or what another ``kind`` of marks reads.

    Raises:
        ValueError, RuntimeError: as in :func:`recording_peak`.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot measure memory on device '{device}': only cpu and cuda are supported")
    marks = kind(device)
    if device.type == "cuda":
        marks.start()
        yield marks
        return
    if profiler_enabled():
        raise RuntimeError(
            "memory cannot be measured inside a running PyTorch profiler: end that profiler first"
        )
    # Without it, the profiler writes a line to standard error when it starts and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Not torch.profiler's, which warns that a second cycle would clear the events of the first.
    with profile(profile_memory=True, use_kineto=True) as profiler:
        yield marks
    marks.read(profiler.kineto_results)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a CUDA device, including the reserve of its allocator, or in memory."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserve
    return machine_memory()[1]
