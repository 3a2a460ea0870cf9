"""Spans of a training step: the seconds that each kind of work takes, and named regions in a trace of ``torch.profiler``.

A span of a kind in :data:`KINDS` is measured while :func:`recording` is active. On a GPU, events in the stream measure the time of
the device, and nothing waits for the device before the seconds are read. While a profiler runs, each span is a region of the trace,
also in the user's own loop. Otherwise, a span costs a fraction of a microsecond.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from hvd_ckpt.utils.torch_private import DisableTorchFunction, disable_current_modes, profiler_enabled

KINDS = ("data", "forward", "backward", "recompute", "wait", "update")
MOST_EVENTS = 10_000  # most pairs of events that are not read yet

# Of the process and not of a thread: autograd runs hooks and recomputations on threads of its own.
_active: SpanTimes | None = None


class SpanTimes:
    """Seconds of each kind of span. The time of a span inside another counts for the inner span only.

    Args:
        device: device of the steps.
        clock: returns seconds; for the CPU.
    """

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu, self._clock = torch.device(device).type == "cuda", clock
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._events: deque[tuple[str, str | None, Any, Any]] = deque()
        self.innermost: str | None = None  # kind of the innermost open span, on any of autograd's threads

    def now(self) -> Any:
        """A point in time; on a GPU, an event in the stream."""
        if not self._on_gpu:
            return self._clock()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, kind: str, outer: str | None, start: Any, end: Any) -> None:
        """Adds a span of a kind inside a span of the kind ``outer``."""
        if not self._on_gpu:
            self._count(kind, outer, end - start)
            return
        self._events.append((kind, outer, start, end))
        # The oldest events have long been reached by the device, so reading them does not wait.
        while len(self._events) > MOST_EVENTS:
            self._read_event()

    def read(self) -> dict[str, float]:
        """The seconds of each kind since the last call; waits for the device."""
        while self._events:
            self._read_event()
        seconds, self._seconds = self._seconds, dict.fromkeys(KINDS, 0.0)
        return seconds

    def _read_event(self) -> None:
        kind, outer, start, end = self._events.popleft()
        end.synchronize()
        self._count(kind, outer, start.elapsed_time(end) / 1000)

    def _count(self, kind: str, outer: str | None, seconds: float) -> None:
        # An inner span takes its time away from the span around it, which adds all of its own time when it ends.
        self._seconds[kind] += seconds
        if outer is not None:
            self._seconds[outer] -= seconds


@contextlib.contextmanager
def recording(times: SpanTimes | None) -> Iterator[None]:
    """A context in which spans are added to ``times``; with None, they are not measured."""
    global _active
    before, _active = _active, times
    try:
        yield
    finally:
        _active = before


class _OpenSpan:
    def __init__(self, times: SpanTimes | None, kind: str | None, name: str | None) -> None:
        self._times, self._kind = times, kind
        self._region: Any = None if name is None else torch.profiler.record_function(f"hvd_ckpt: {name}")

    def __enter__(self) -> None:
        if self._region is not None:
            with disable_current_modes(), DisableTorchFunction():  # hidden from modes that count calls
                self._region.__enter__()
        if self._times is not None and self._kind is not None:
            self._outer, self._times.innermost = self._times.innermost, self._kind
            self._start = self._times.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._times is not None and self._kind is not None:
            self._times.add(self._kind, self._outer, self._start, self._times.now())
            self._times.innermost = self._outer
        if self._region is not None:
            with disable_current_modes(), DisableTorchFunction():
                self._region.__exit__(None, None, None)


_NOTHING = contextlib.nullcontext()


def span(
    kind: str | None, name: str | Callable[[], str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """A context for a span of the step.

    Args:
        kind: one of :data:`KINDS`, or None for a region of the trace only.
        name: name of the region, or a function that returns it; by default the kind.
    """
    profiling = profiler_enabled()
    if not profiling and (_active is None or kind is None):
        return _NOTHING
    label = None
    if profiling:
        label = name() if callable(name) else name or kind
    return _OpenSpan(_active, kind, label)
