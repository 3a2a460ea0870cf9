"""Frames: which checkpointed region runs on this thread, and whether it is the first pass or a recomputation.

A module with a side effect (counting a batch, communicating with other ranks, printing) must know whether it runs for the first
time. Each checkpointed call owns a :class:`Frame`. While its function runs, an entry for the frame lies on a stack of this thread.
Each thread has its own stack, since autograd runs recomputations on its own threads. It is a stack because regions nest: an inner
region runs its first pass inside the recomputation of an outer one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hvd_ckpt.utils.torch_private import DisableTorchFunction, disable_current_modes, in_dispatch_mode

T = TypeVar("T")


class Frame:
    """Values that a checkpointed call passes from its first pass to its recomputations."""

    def __init__(self) -> None:
        self.stash: list[Any] = []

    @contextlib.contextmanager
    def enter(self, recomputing: bool) -> Iterator[None]:
        """A context in which this frame is the innermost frame of the calling thread."""
        _thread.stack.append(_FrameRun(self, recomputing))
        try:
            yield
        finally:
            _thread.stack.pop()


@dataclass
class _FrameRun:
    """One run of the function of a frame. A recomputation reads the stash from its start."""

    frame: Frame
    recomputing: bool  # False in the first pass
    cursor: int = 0

    def read(self) -> Any:
        stash = self.frame.stash
        if self.cursor >= len(stash):
            raise RuntimeError(
                f"A recomputation asked for {self.cursor + 1} value(s) that its first pass should have computed, but the "
                f"first pass computed {len(stash)}: the checkpointed function must do the same work each time it runs."
            )
        self.cursor += 1
        return stash[self.cursor - 1]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_FrameRun] = []
        self.keeping: list[int] = []  # depths at which without_recomputation() was entered


_thread = _Thread()


def depth() -> int:
    """The number of runs of checkpointed functions that this thread is in."""
    return len(_thread.stack)


def is_checkpointing() -> bool:
    """Whether the first pass of a checkpointed function runs on this thread (torchgpipe's ``is_checkpointing``).

    Under :class:`torch.no_grad`, nothing is recomputed later, so the function returns False. In a checkpointed call inside a
    recomputation, both this function and :func:`is_recomputing` return True.
    """
    return any(not entry.recomputing for entry in _thread.stack)


def is_recomputing() -> bool:
    """Whether a checkpointed function is being recomputed for the backward pass on this thread (torchgpipe's ``is_recomputing``).

    Use it to guard side effects::

        if not hc.is_recomputing():
            self.batches_seen += 1
    """
    return any(entry.recomputing for entry in _thread.stack)


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """A context in which forward passes of this thread keep everything: checkpointed calls, chains of segments and plans run
    without recomputation.

    Results are the same bit for bit. It is for a forward pass whose backward pass follows at once, such as that of the last
    micro-batch (:func:`hvd_ckpt.accumulate`). It has an effect on forward passes only: a recomputation inside the context does what
    its first pass did.
    """
    _thread.keeping.append(depth())
    try:
        yield
    finally:
        _thread.keeping.pop()


def keeps_everything() -> bool:
    """Whether a call should run without a checkpoint, because of :func:`without_recomputation`.

    A recomputation that has begun inside the context belongs to another forward pass, to which the context does not apply.
    """
    # Only the entries above the depth at which the innermost context was entered are newer than the context.
    if not _thread.keeping:
        return False
    return not any(entry.recomputing for entry in _thread.stack[_thread.keeping[-1] :])


class aside:
    """A context for tensor operations of the library that are not part of the user's computation: hidden from modes and from
    autograd.

    Selective checkpointing matches operations by their count, and these may be missing in the recomputation.
    """

    __slots__ = ("_contexts",)

    def __enter__(self) -> None:
        self._contexts: list[AbstractContextManager[Any]] = [DisableTorchFunction(), torch.no_grad()]
        if in_dispatch_mode():  # slow to leave and enter
            self._contexts.append(disable_current_modes())
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def remembered(compute: Callable[[], T]) -> T:
    """Returns ``compute()`` in the first pass, and the remembered result in each recomputation.

    It is for work that must not run twice, such as a collective operation. The result is kept until the graph of the region is
    freed, so it should be small and detached. Calls are matched by their order in the region. ``compute`` is hidden from dispatch
    modes, because selective checkpointing matches operations by their count, and these are missing in the recomputation.

    Raises:
        RuntimeError: the recomputation needs more values than the first pass has computed.
    """
    # A stack of three regions, from the outside in, and what happens in the innermost one:
    #
    #     first pass, first pass, first pass       compute, and remember in all three: each may be recomputed on its own
    #     recomputing, first pass, first pass      read from the first, and remember in the other two
    #     recomputing, first pass, recomputing     read from the last; nothing is remembered
    first_passes: list[Frame] = []
    for entry in reversed(_thread.stack):
        if entry.recomputing:
            value: T = entry.read()
            break
        first_passes.append(entry.frame)
    else:
        with disable_current_modes():
            value = compute()
    for frame in first_passes:
        frame.stash.append(value)
    return value
