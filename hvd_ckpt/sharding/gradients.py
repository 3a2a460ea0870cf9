"""Sharded gradients: their placeholder in ``p.grad``, and the gathering of whole gradients.

Code may read a gradient between the backward pass and the step (clipping, norms for a log, noise, a check for None). It then gets
a placeholder of the right shape and without memory, and using its values is an error that says what to do. Without the placeholder
the code would find None and leave out the gradient without an error. If None or another tensor replaces it, this is detected
before the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.gradients import AbsentGradient, TrackedGradient
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.layout import Layout

IN_SHARDS = (
    "is split over the ranks: clip with hc.clip_grad_norm_(model.parameters(), max_norm); for anything else, call "
    "optimizer.synchronize(), use the gradients of optimizer.pieces, and step within optimizer.skip_synchronize()"
)
IN_PIECES = (
    "is not in optimizer.pieces now: clip with hc.clip_grad_norm_(model.parameters(), max_norm); at stages 2 and 3, pieces have "
    "their parts of gradients between optimizer.synchronize() and optimizer.step()"
)


class ShardedGradient(AbsentGradient):
    """A gradient whose values are in the ranks' shards."""

    absence = "split over the ranks"


class ZeroGradient(ShardedGradient):
    """Stands in ``p.grad`` where a gradient was that a step has consumed. It may be set to zero, as by
    ``optimizer.zero_grad(set_to_none=False)``, and then counts as a gradient of zeros.

    Attributes:
        is_zero: it was set to zero.
    """

    is_zero = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "zero_" and isinstance(args[0], ZeroGradient):
            args[0].is_zero = True
            return args[0]
        if name == "_foreach_zero_":
            # The list may also have gradients whose values are here.
            others = []
            for gradient in args[0]:
                if isinstance(gradient, ZeroGradient):
                    gradient.is_zero = True
                else:
                    others.append(gradient)
            return func(others) if others else None
        return super().__torch_function__(func, types, args, kwargs)


def whole_gradients(
    layout: Layout, exchange: Exchange, shards: Mapping[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Gathers the gradients of groups, one group at a time. Collective.

    Args:
        shards: this rank's, by the group's position; of the same groups on every rank.

    Yields:
        The index of each parameter and its gradient.
    """
    # A gather is collective, so all ranks go through the groups in one order, whatever that of their dictionaries.
    for position, shard in sorted(shards.items()):
        group = layout.groups[position]
        flat = torch.empty(group.padded, dtype=shard.dtype, device=shard.device)
        exchange.all_gather(shard, flat, f"gradients.{position}.whole").wait()
        yield from zip(group.indices, layout.views(group, flat))


DROPPED, REPLACED = 1.0, 2.0


# What stands in ``p.grad`` after a gradient has left, and what that tells:
#
#   a ShardedGradient   nothing was done to it
#   a ZeroGradient      none has left in this step: that of an earlier step was set to zero
#   None                it was dropped by hand, unless a hook has just made room for the next one (_arriving)
#   another tensor      the next gradient, if one has been accumulated (_arrived); else it was replaced by hand
class SentGradients:
    """The gradients that are in shards, or on their way there, in this step, and what is done to ``p.grad`` meanwhile.

    Args:
        layout: the parameters.

    Attributes:
        rounds: by parameter whose gradient left since the last synchronization, in which round last.
        held: for each parameter, whether the shards of the last synchronization have its gradient.
        consumed: parameters whose gradient a step has consumed, or whose step was skipped, until gradients are cleared.
        begun_anew: by parameter whose gradient was dropped, what had left until then; ranks that add it up must have the same.
    """

    def __init__(self, layout: Layout) -> None:
        self.rounds: dict[int, int] = {}
        self.held = [False] * len(layout.parameters)
        self.consumed: set[int] = set()
        self.begun_anew: dict[int, list[tuple[int, bool]]] = {}
        self._layout = layout
        self._tracked: dict[int, TrackedGradient] = {}
        # Parameters of which one gradient has left, and the next is about to be accumulated; and those where it has been.
        self._arriving: set[int] = set()
        self._arrived: set[int] = set()
        self._replaced: dict[int, float] = {}

    def note(self, index: int) -> None:
        """The parameter's gradient is in shards, or on its way there."""
        parameter = self._layout.parameters[index]
        if not isinstance(parameter.grad, ShardedGradient) or isinstance(parameter.grad, ZeroGradient):
            parameter.grad = ShardedGradient(parameter, self._layout.names[index], IN_SHARDS)
        self._arriving.discard(index)
        self._arrived.discard(index)

    def note_sent(self, index: int, number: int) -> None:
        """The parameter's gradient leaves in this round."""
        if self.done_by_hand(index):
            self._replaced.setdefault(index, REPLACED)
        self.rounds[index] = number
        self.note(index)

    def make_room(self, index: int) -> None:
        """A gradient of the parameter is about to be accumulated."""
        parameter = self._layout.parameters[index]
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None
            self._arriving.add(index)
        elif self.done_by_hand(index) == REPLACED:
            self._replaced[index] = REPLACED

    def begin_anew(self, index: int) -> bool:
        """Forgets what had left of a gradient if that was dropped; returns whether it was."""
        if self.done_by_hand(index) != DROPPED:
            return False
        until = self.rounds.pop(index, -1), self.held[index]
        self.begun_anew.setdefault(index, []).append(until)
        self.held[index] = False
        return True

    def check(self, indices: Iterable[int]) -> RuntimeError | None:
        """The error for the first gradient here that was changed in place since it was accumulated."""
        for index in indices:
            tracked = self._tracked.get(index)
            if tracked is not None:
                tracked.check()
                if tracked.error is not None:
                    return tracked.error
        return None

    def note_arrived(self, index: int) -> None:
        """A gradient of the parameter has been accumulated."""
        if index not in self._tracked:
            self._tracked[index] = TrackedGradient(self._layout.parameters[index], self._layout.names[index])
        self._tracked[index].note()
        if index in self._arriving:
            self._arriving.discard(index)
            self._arrived.add(index)

    def done_by_hand(self, index: int) -> float:
        """The change by hand of a gradient that has left: DROPPED, REPLACED or 0."""
        if index in self._replaced:
            return self._replaced[index]
        gradient = self._layout.parameters[index].grad
        left = index in self.rounds or self.held[index]
        if not left or index in self._arriving or isinstance(gradient, ShardedGradient):
            return 0.0
        if gradient is None:
            return DROPPED
        return 0.0 if index in self._arrived else REPLACED

    def clear(self) -> None:
        """The step's gradients are reduced."""
        for tracked in self._tracked.values():
            tracked.begin_step()
        self.rounds.clear()
        self._arriving.clear()
        self._arrived.clear()
        self._replaced.clear()
        self.begun_anew.clear()

    def drop(self, indices: Iterable[int]) -> None:
        """Leaves nothing in the place of these gradients."""
        for index in indices:
            if isinstance(self._layout.parameters[index].grad, ShardedGradient):
                self._layout.parameters[index].grad = None

    def consume(self) -> None:
        """The shards of the last synchronization have been used, or are dropped."""
        for index, held in enumerate(self.held):
            # Not one that was dropped by hand, nor one that has values again, for another optimizer.
            if held and isinstance(self._layout.parameters[index].grad, ShardedGradient):
                self._layout.parameters[index].grad = None
                self.consumed.add(index)
        self.held[:] = [False] * len(self.held)

    def is_zero(self, index: int) -> bool:
        """Whether the parameter's gradient is zeros, none of which has left."""
        if index in self.rounds or self.held[index]:
            return False
        gradient = self._layout.parameters[index].grad
        # Of gradients that have not left, only zeros make room for another one, which may then turn out to be None.
        return isinstance(gradient, ZeroGradient) or (gradient is None and index in self._arriving)

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """A context in which gradients are set to zero or to None; those that were consumed are there again for it."""
        parameters = self._layout.parameters
        for index in self.consumed:
            if parameters[index].grad is None:
                self._place_zero(index)
        try:
            yield
        finally:
            consumed, self.consumed = self.consumed, set()
            for index in consumed:
                gradient = parameters[index].grad
                if isinstance(gradient, ZeroGradient) and not gradient.is_zero:  # not cleared
                    parameters[index].grad = None
                    self.consumed.add(index)

    def set_zero(self, indices: Iterable[int]) -> None:
        """These parameters, which have no gradient, get one of zeros."""
        for index in indices:
            self._place_zero(index).is_zero = True

    def _place_zero(self, index: int) -> ZeroGradient:
        parameter = self._layout.parameters[index]
        placed = ZeroGradient(parameter, self._layout.names[index], IN_SHARDS)
        parameter.grad = placed
        return placed


def check_by_hand(names: Sequence[str], by_hand: Sequence[float]) -> None:
    """Raises RuntimeError where a gradient that had left was replaced on some rank.

    Args:
        by_hand: for each parameter, what was done to it: the greatest over the ranks.
    """
    for name, done in zip(names, by_hand):
        if done == REPLACED:
            raise changed_by_hand(name, "set by hand")


def changed_by_hand(name: str, what: str) -> RuntimeError:
    """The error for a gradient that was changed after it had left."""
    return RuntimeError(
        f"the gradient of parameter '{name}' was {what} after the ranks had begun to add it up; to drop gradients, call "
        f"optimizer.synchronize() and then optimizer.zero_grad(); otherwise it {IN_SHARDS}"
    )
