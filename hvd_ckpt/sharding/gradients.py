"""Sharded gradients: their placeholder in ``p.grad``, and the gathering of whole gradients.

Code may read a gradient between the backward pass and the step (clipping, norms for a log, noise, a check for None). It then gets
a placeholder of the right shape and without memory, and using its values is an error that says what to do. Without the placeholder
the code would find None and leave out the gradient without an error. If None or another tensor replaces it, this is detected
before the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hvd_ckpt.reduction.gradients import DROPPED, OWN, AbsentGradient, TrackedGradient, has_values
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
    usual = IN_SHARDS


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


class SentGradients:
    """The gradients that are in shards, or on their way there, in this step, and what is done to ``p.grad`` meanwhile.

    The table of :mod:`hvd_ckpt.reduction.gradients` has the states of ``p.grad``. A :class:`ZeroGradient` stands in it where
    nothing has left, and makes room for what is accumulated.

    Args:
        layout: the parameters.

    Attributes:
        rounds: by parameter whose gradient left since the last synchronization, in which round last.
        held: for each parameter, whether the shards of the last synchronization have its gradient.
        consumed: parameters whose gradient a step has consumed, or whose step was skipped, until gradients are cleared.
        dropped: by parameter whose gradient was dropped, what had left until then; ranks that add it up must have the same.
    """

    def __init__(self, layout: Layout) -> None:
        self.rounds: dict[int, int] = {}
        self.held: list[bool] = []
        self.consumed: set[int] = set()
        self.dropped: dict[int, list[tuple[int, bool]]] = {}
        self._layout = layout
        self._gradients: list[TrackedGradient] = []
        self._cleared: set[int] = set()  # zeros of these have made room for a gradient that has not come yet
        self.grow()

    def grow(self) -> None:
        """The layout has grown, or is new."""
        for index in range(len(self.held), len(self._layout.parameters)):
            parameter, name = self._layout.parameters[index], self._layout.names[index]
            self._gradients.append(TrackedGradient(parameter, name, ShardedGradient))
            self.held.append(False)

    def note(self, index: int) -> None:
        """The parameter's gradient is in shards, or on its way there."""
        self._gradients[index].send(None)

    def note_sent(self, index: int, number: int) -> None:
        """The parameter's gradient leaves in this round."""
        self.rounds[index] = number
        self.note(index)

    def make_room(self, index: int) -> None:
        """A gradient of the parameter is about to be accumulated."""
        gradient = self._gradients[index]
        if gradient.is_away:
            gradient.make_room()
        elif isinstance(gradient.parameter.grad, ZeroGradient):
            gradient.parameter.grad = None
            self._cleared.add(index)

    def note_arrived(self, index: int) -> None:
        """A gradient of the parameter has been accumulated."""
        self._gradients[index].arrived()
        self._cleared.discard(index)

    def unsent(self, index: int) -> torch.Tensor | None:
        """What has been accumulated of a gradient and has not left yet."""
        gradient = self._gradients[index]
        if gradient.is_away:
            return gradient.part
        own = gradient.parameter.grad
        return own if has_values(own) else None

    def check(self, indices: Iterable[int], is_alone: bool) -> RuntimeError | None:
        """Finds out what was done to gradients by hand; returns the first error.

        Args:
            is_alone: there is one rank, so that nothing is wrong with changes of what has not left.
        """
        for index in indices:
            gradient = self._gradients[index]
            if gradient.may_be_changed and (gradient.is_away or not is_alone):
                error = gradient.look()
                if error is not None:
                    return error
        return None

    def begin_anew(self, index: int) -> bool:
        """Forgets what had left of a gradient if it was found that this was dropped; returns whether it was."""
        if self._gradients[index].state is not DROPPED or not (index in self.rounds or self.held[index]):
            return False
        until = self.rounds.pop(index, -1), self.held[index]
        self.dropped.setdefault(index, []).append(until)
        self.held[index] = False
        return True

    def is_dropped(self, index: int) -> bool:
        """Whether the parameter's gradient was dropped after it had left, and nothing has come since."""
        gradient = self._gradients[index]
        return gradient.state is DROPPED and gradient.parameter.grad is None

    def is_changed(self, index: int) -> bool:
        """Whether a gradient that has left was dropped or replaced, or more has come."""
        gradient = self._gradients[index]
        return gradient.state is not OWN and gradient.may_be_changed

    def clear(self) -> None:
        """The step's gradients are reduced."""
        for gradient, held in zip(self._gradients, self.held):
            if not (held and gradient.is_away):
                gradient.begin_step()
        self.rounds.clear()
        self._cleared.clear()
        self.dropped.clear()

    def drop(self, indices: Iterable[int]) -> None:
        """Leaves nothing in the place of these gradients."""
        for index in indices:
            gradient = self._gradients[index]
            if isinstance(gradient.parameter.grad, ShardedGradient):
                gradient.parameter.grad = None
            gradient.begin_step()

    def consume(self) -> None:
        """The shards of the last synchronization have been used, or are dropped."""
        for index, gradient in enumerate(self._gradients):
            if not self.held[index]:
                continue
            part = gradient.part
            gradient.begin_step()
            # Not one that was dropped by hand, nor one that has values again, for another optimizer.
            if isinstance(gradient.parameter.grad, ShardedGradient):
                gradient.parameter.grad = part
                if part is None:
                    self.consumed.add(index)
                else:
                    gradient.note()
        self.held[:] = [False] * len(self.held)

    def is_zero(self, index: int) -> bool:
        """Whether the parameter's gradient is zeros, none of which has left."""
        if index in self.rounds or self.held[index]:
            return False
        gradient = self._layout.parameters[index].grad
        # Of gradients that have not left, only zeros make room for another one, which may then turn out to be None.
        return isinstance(gradient, ZeroGradient) or (gradient is None and index in self._cleared)

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
        placed = ZeroGradient(parameter, self._layout.names[index])
        parameter.grad = placed
        return placed


def dropped_on_some(name: str) -> RuntimeError:
    """The error for a gradient that some ranks have dropped after it had left."""
    return RuntimeError(
        f"the gradient of parameter '{name}' was dropped on some rank but not on all after the ranks had begun to add it up; to "
        f"drop gradients, call optimizer.synchronize() and then optimizer.zero_grad(); otherwise it {IN_SHARDS}"
    )
