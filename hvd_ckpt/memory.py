"""Peak memory of a piece of work, in exact bytes.

A claim about memory is worth as much as the way it was measured. The resident set of a process answers another
question: it counts the interpreter, caches and pages the allocator has not given back. This module counts what
PyTorch's own allocators handed out: on CUDA from the caching allocator's statistics, on CPU (whose allocator
keeps none) from the event it reports to the profiler for every block it allocates or frees. The same work gives the same
number on every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["PeakMemory", "measure_peak", "recording_peak"]


@dataclass
class PeakMemory:
    """What a piece of work took from the allocator; both figures count from the start of the work.

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


def recording_peak(device: torch.device | str = "cpu") -> contextlib.AbstractContextManager[PeakMemory]:
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
    device = torch.device(device)
    if device.type == "cuda":
        return _recording_cuda(device)
    if device.type == "cpu":
        return _recording_cpu()
    raise ValueError(f"cannot measure memory on device '{device}': only cpu and cuda are supported")


@contextlib.contextmanager
def _recording_cuda(device: torch.device) -> Iterator[PeakMemory]:
    memory = PeakMemory()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    yield memory
    torch.cuda.synchronize(device)
    memory.peak_bytes = torch.cuda.max_memory_allocated(device) - start
    memory.held_bytes = torch.cuda.memory_allocated(device) - start


@contextlib.contextmanager
def _recording_cpu() -> Iterator[PeakMemory]:
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "memory cannot be measured inside a running PyTorch profiler: end that profiler first"
        )
    memory = PeakMemory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield memory
    memory.peak_bytes, memory.held_bytes = _replay(profiler)


def _replay(profiler: profile) -> tuple[int, int]:
    """Add up the allocator's events in the order they happened; returns the peak and the final sum."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocated = peak = 0
    for event in events:
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            allocated += event.nbytes()  # type: ignore[attr-defined]  # absent from the stub of _KinetoEvent
            peak = max(peak, allocated)
    return peak, allocated
