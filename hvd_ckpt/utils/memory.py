"""Peak memory of a piece of work, in exact bytes.

A claim about memory is worth as much as the way it was measured. The resident set of a process answers another
question: it counts the interpreter, caches and pages the allocator has not given back. This module counts what
PyTorch's own allocators handed out: on CUDA from the caching allocator's statistics, on CPU (whose allocator
keeps none) from the event it reports to the profiler for every block it allocates or frees. The same work gives the same
number on every run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hvd_ckpt.torch_private import DeviceType, profiler_enabled

_MARK = "hvd_ckpt.mark."


@dataclass
class PeakMemory:
    """Memory that a piece of work took from the allocator; both figures count from the start of the work.

    Attributes:
        peak_bytes: the most bytes allocated at any one time, above those allocated at the start.
        held_bytes: bytes still allocated at the end, above those allocated at the start.
    """

    peak_bytes: int = 0
    held_bytes: int = 0


def measure_peak(work: Callable[[], object], device: torch.device | str = "cpu") -> PeakMemory:
    """Call ``work()`` and return the exact peak of the memory it allocated on ``device``.

    Only the figures are kept: what ``work`` returns is dropped before the end is taken, so ``held_bytes`` is what
    the work left behind elsewhere. See :func:`recording_peak` for what is counted.
    """
    with recording_peak(device) as memory:
        work()
    return memory


@contextlib.contextmanager
def recording_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Measure the body of a ``with`` statement; the figures are there once the body has ended.

    On CPU every block that PyTorch allocates in the body is counted with its requested size, workspaces of
    operators included, on the calling thread and on autograd's threads. Not counted are blocks allocated before
    the start (freeing one in the body does not lower the figures: begin where the work begins), and other
    threads, such as the communication threads of Horovod and Gloo. On CUDA it is
    ``torch.cuda.max_memory_allocated`` of the device, whichever thread allocates.

    Raises:
        ValueError: for a device that is neither CPU nor CUDA.
        RuntimeError: on CPU inside another profiler: PyTorch runs one at a time.
    """
    memory = PeakMemory()
    with recording_marks(device) as marks:
        yield memory
        marks.mark("end")
    memory.peak_bytes, memory.held_bytes = marks.marks[-1].peak_bytes, marks.marks[-1].bytes


@dataclass(frozen=True)
class Mark:
    """The memory at a mark, in bytes above the start.

    Attributes:
        name: as it was given.
        bytes: allocated at the mark.
        peak_bytes: the most allocated since the mark before.
    """

    name: str
    bytes: int
    peak_bytes: int


class Marks:
    """Peaks of the parts of a piece of work; see :func:`recording_marks`.

    Attributes:
        marks: in order, once the recording has ended.
        timeline: (seconds since the start, bytes above the start) at every change; on CPU only.
    """

    def __init__(self, device: torch.device) -> None:
        self.marks: list[Mark] = []
        self.timeline: list[tuple[float, int]] = []
        self._device = device
        self._names: list[str] = []
        self._start = 0

    def mark(self, name: str) -> None:
        """Ends a part of the work here."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            now = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self.marks.append(Mark(name, now - self._start, peak - self._start))
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._names.append(name)
        with torch.profiler.record_function(f"{_MARK}{len(self._names) - 1}"):
            pass

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
            yield
            return
        with _profiling() as profiler:
            yield
        self._read(profiler)

    def _read(self, profiler: profile) -> None:
        allocated = peak = 0
        start: int | None = None
        for event in _events(profiler):
            start = event.start_ns() if start is None else start
            if event.name() == "[memory]":
                allocated += event.nbytes()
                peak = max(peak, allocated)
                self.timeline.append(((event.start_ns() - start) / 1e9, allocated))
            else:
                name = self._names[int(event.name().removeprefix(_MARK))]
                self.marks.append(Mark(name, allocated, peak))
                peak = allocated


@contextlib.contextmanager
def recording_marks(device: torch.device | str = "cpu") -> Iterator[Marks]:
    """Measure parts of the body of a ``with`` statement, each ended by ``marks.mark(name)``.

    Counts what :func:`recording_peak` counts.

    Raises:
        ValueError, RuntimeError: as :func:`recording_peak`.
    """
    marks = Marks(_measurable(device))
    with marks._recording():
        yield marks


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still have: of a CUDA device, with what its allocator keeps in reserve, or of the machine."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserve
    import psutil

    return int(psutil.virtual_memory().available)


def _measurable(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot measure memory on device '{device}': only cpu and cuda are supported")
    return device


@contextlib.contextmanager
def _profiling() -> Iterator[profile]:
    if profiler_enabled():
        raise RuntimeError(
            "memory cannot be measured inside a running PyTorch profiler: end that profiler first"
        )
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # else the profiler writes a line to standard error as it starts and ends
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield profiler


def _events(profiler: profile) -> list[Any]:
    """The CPU allocator's events and the marks, in the order they happened."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [
        event
        for event in results.events()
        if (event.name() == "[memory]" and event.device_type() == DeviceType.CPU)
        or event.name().startswith(_MARK)
    ]
    events.sort(key=lambda event: event.start_ns())
    return events
