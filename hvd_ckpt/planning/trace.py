"""Trace of a block: the seconds, bytes and saved tensors of each torch function that it calls.

The block runs once under a tape that drops everything that can be dropped. The tape then has the whole data flow: which call reads
which result, and which results and inner tensors are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.recompute.calls import call_name, tensors_in
from hvd_ckpt.recompute.keeper import memory_of
from hvd_ckpt.recompute.masks import Recording
from hvd_ckpt.recompute.replay import Call, unpack
from hvd_ckpt.recompute.saved import compress
from hvd_ckpt.recompute.tape import Policy, Tape
from hvd_ckpt.utils.measure import now
from hvd_ckpt.utils.torch_private import DisableTorchFunction


@dataclass
class TracedCall:
    """One torch function of a block.

    Attributes:
        name: name of the function.
        seconds: duration of the call, without the drawing of its ``masks``.
        droppable: whether its results can be dropped. If not, the fields below are empty.
        reads: (call, result) for each argument that is a dropped result of the block.
        results: for each result, the number of the memory that it lies in. Several results may lie in one.
        saved: numbers of the results that autograd saves for any call.
        inner: for each inner tensor that autograd saves, the number of its memory.
        masks: whether random masks are all that it draws.
    """

    name: str
    seconds: float = field(repr=False)
    droppable: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    inner: list[int] = field(default_factory=list)
    masks: bool = False


@dataclass
class Trace:
    """All calls of a block.

    Attributes:
        calls: the calls that return tensors, in order.
        memory: bytes of each piece of memory that the block allocates, by number; 0 for memory of its inputs.
        compressible: bytes that exact compression of an inner tensor would save, by the number of its memory.
    """

    calls: list[TracedCall]
    memory: list[int]
    compressible: dict[int, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(call.name for call in self.calls)

    @property
    def form(self) -> str:
        """The calls and the data flow without sizes and times: equal for blocks that differ in widths only."""
        return repr(self.calls)


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Runs ``function(*args, **kwargs)`` once, with gradients, and returns its trace."""
    # Made before its hooks are entered: when its keeper is made, it
    # looks for outer hooks, through which it must pass what it keeps.
    watch = _RecordingTape(torch.device("cpu"))
    for tensor in tensors_in(args, kwargs):
        if tensor.device.type != "cpu":
            watch.device = tensor.device
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(watch.pack, unpack), watch:
        result = function(*args, **kwargs)
    del result
    return watch.finish()


def fastest(traces: Sequence[Trace]) -> Trace:
    """The last of several traces of one block, with the shortest time of each call in all of them."""
    last = traces[-1]
    for other in traces[:-1]:
        if other.names == last.names:
            for call, same in zip(last.calls, other.calls):
                call.seconds = min(call.seconds, same.seconds)
    return last


class _RecordingTape(Tape):
    """A tape that drops everything and records each call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Policy(calls=(), dropped=frozenset()))
        self.device = device
        self._trace = Trace([], [])
        self._noted: dict[int, Call] = {}
        self._pending: list[Tensor] = []
        self._drawing = 0.0
        self._places: dict[tuple[int, int], int] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A result in the memory of an earlier dropped result (a view, or a change in place) gets the place of that result, so that
        # the two are dropped together. Any other result or inner tensor gets a new place with the bytes of its memory.
        number = self._count
        self._pending, self._drawing = [], 0.0
        sources = {
            memory_of(tensor): tag
            for tensor in tensors_in(args, kwargs)
            if (tag := self._tag(tensor)) is not None
        }
        start = now(self.device)
        result = super().call(func, args, kwargs)
        seconds = now(self.device) - start
        if self._count == number:
            # The call has returned no tensor, so it has no number, and the next call gets this one.
            self._noted.pop(number, None)
            return result
        traced = TracedCall(call_name(func), seconds - self._drawing)
        self._trace.calls.append(traced)
        call = self._noted.get(number)
        # The tape fills these in only if the results can be dropped (`Tape._record`).
        if call is not None and (call.args or call.kwargs or call.inner):
            own: dict[int | None, int] = {}
            sizes = self._trace.memory

            def place_of(tensor: Tensor) -> tuple[int, bool]:
                """The number of a tensor's memory, and whether it is new."""
                memory = memory_of(tensor)
                if memory is not None and (tag := sources.get(memory)) is not None:
                    return self._places[tag.call.number, tag.output], False
                place = own.setdefault(memory, len(sizes))
                if is_new := place == len(sizes):
                    sizes.append(_bytes_of(tensor))
                return place, is_new

            traced.droppable = True
            traced.masks = bool(call.masks)
            traced.reads = [(reference.call.number, reference.output) for reference in call.references]
            inputs = {memory_of(tensor) for tensor in tensors_in(args, kwargs)} - {None}
            for output, tensor in enumerate(tensors_in(result)):
                place, is_new = place_of(tensor)
                if is_new and memory_of(tensor) in inputs:
                    sizes[place] = 0
                self._places[number, output] = place
                traced.results.append(place)
            for tensor in self._pending:
                place, is_new = place_of(tensor)
                if is_new:
                    with DisableTorchFunction():
                        packed = compress(tensor.detach())
                    if packed is not None:
                        self._trace.compressible[place] = tensor.nbytes - packed.payload.nbytes
                traced.inner.append(place)
        self._pending = []
        return result

    def _drops(self, number: int, name: str) -> bool:
        return True

    def _begin(self, call: Call) -> None:
        self._noted[call.number] = call

    def _end(self, call: Call, recording: Recording | None) -> None:
        super()._end(call, recording)
        self._drawing = recording.seconds if recording is not None and recording.complete else 0.0

    def pack(self, tensor: Tensor) -> Any:
        call = None if self._running is None else self._running.call
        inner = 0 if call is None else call.inner
        packed = super().pack(tensor)
        if call is not None and call.inner > inner:
            self._pending.append(tensor)
        return packed

    def finish(self) -> Trace:
        for number, call in self._noted.items():
            # Keys from 0 are results. Inner tensors have the keys -1, -2, ... and are listed in `inner`.
            self._trace.calls[number].saved = {key for key in call.wanted if key >= 0}
        return self._trace


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of the memory of a tensor; of the values of a sparse tensor."""
    if memory_of(tensor) is None:
        return tensor._values().nbytes if tensor.is_sparse else 0
    return tensor.untyped_storage().nbytes()
