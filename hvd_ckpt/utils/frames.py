"""Which checkpointed region is running on this thread, and is it the first pass or a recomputation?

A module that has a side effect (counts a batch, talks to other ranks, prints) must know whether it runs for
the first time. Every checkpointed call owns a :class:`Frame`; while its function runs, an entry for that
frame lies on a stack of this thread. The stack is per thread because autograd runs recomputations on threads
of its own, and it is a stack because regions nest: an inner region runs its first pass inside the
recomputation of an outer one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hvd_ckpt.torch_private import DisableTorchFunction, disable_current_modes, in_dispatch_mode

T = TypeVar("T")


class Frame:
    """Values that one checkpointed call hands from its first pass to its recomputations."""

    def __init__(self) -> None:
        self.stash: list[Any] = []

    @contextlib.contextmanager
    def enter(self, recomputing: bool) -> Iterator[None]:
        """A context in which this frame is the innermost one of the calling thread."""
        _thread.stack.append(_Entry(self, recomputing))
        try:
            yield
        finally:
            _thread.stack.pop()


@dataclass
class _Entry:
    """One run of a frame's function. A recomputation reads the stash from its start on."""

    frame: Frame
    recomputing: bool  # else it is the first pass
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
        self.stack: list[_Entry] = []
        self.keeping: list[int] = []  # the depth at which each without_recomputation() was entered


_thread = _Thread()


def depth() -> int:
    """How many runs of checkpointed functions this thread is in."""
    return len(_thread.stack)


def is_checkpointing() -> bool:
    """True while the first pass of a checkpointed function runs on this thread (torchgpipe's
    ``is_checkpointing``).

    Under :class:`torch.no_grad` nothing is recomputed later, so nothing counts as checkpointed. Inside a
    recomputation that contains another checkpointed call, both this and :func:`is_recomputing` are true.
    """
    return any(not entry.recomputing for entry in _thread.stack)


def is_recomputing() -> bool:
    """True while a checkpointed function is run again for the backward pass (torchgpipe's
    ``is_recomputing``).

    Guard side effects with it::

        if not hc.is_recomputing():
            self.batches_seen += 1
    """
    return any(entry.recomputing for entry in _thread.stack)


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Forward passes of this thread keep everything inside: checkpointed calls, chains of segments and applied plans
    just run.

    Results are the same bit for bit (of a plan that keeps numbers in fewer bytes: those without it). For a forward pass
    whose backward pass follows at once, such as that of the last micro-batch (:func:`hvd_ckpt.accumulate`). It matters
    in forward passes only: what is recomputed in a backward pass inside does as its first pass did.
    """
    _thread.keeping.append(depth())
    try:
        yield
    finally:
        _thread.keeping.pop()


def keeps_everything() -> bool:
    """Whether a call that would be checkpointed now should just run, because of :func:`without_recomputation`.

    A recomputation that has begun since is that of another forward pass, in which this was not asked for.
    """
    if not _thread.keeping:
        return False
    return not any(entry.recomputing for entry in _thread.stack[_thread.keeping[-1] :])


class aside:
    """For tensor operations beside those of the program: no mode sees them, no graph records them.

    Selective checkpointing matches operations by their count, and these may be missing from the recomputation.
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
    """``compute()`` in the first pass; its remembered result in every recomputation.

    For work that must not be done twice, such as a collective operation. The result is kept until the graph
    of the region is freed, so it should be small and detached. Calls are matched by their order within the
    region.

    The result is read from the innermost recomputation on the stack, and remembered by every first pass
    inside it (all of them when nothing is being recomputed): each of those regions can later be recomputed on
    its own. ``compute`` is hidden from dispatch modes, because selective checkpointing matches operations by
    their count, and these operations are missing from the recomputation.

    Raises:
        RuntimeError: the recomputation asks for more values than the first pass computed.
    """
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
