"""Sharded gradients: their placeholder in ``p.grad``, and the gathering of whole gradients.

Code may read a gradient between the backward pass and the step (clipping, norms for a log, noise, a check for None). It then gets
a placeholder of the right shape and without memory, and using its values is an error that says what to do. Without the placeholder
the code would find None and leave out the gradient without an error. If None or another tensor replaces it, this is detected
before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvd_ckpt.reduction.gradients import CLEARED, OWN, USED, ZERO, AbsentGradient, TrackedGradient
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


class PartedGradient(TrackedGradient):
    """What stands in the ``grad`` of a parameter whose gradient goes to shards."""

    __slots__ = ()

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        super().__init__(parameter, name, ShardedGradient)

    @property
    def is_zero(self) -> bool:
        """Whether it is zeros, none of which has left."""
        gradient = self.parameter.grad
        return (
            isinstance(gradient, ZeroGradient)
            if self.state is ZERO
            else gradient is None and self.state is CLEARED
        )

    @property
    def is_there(self) -> bool:
        """Whether clearing would find a gradient."""
        return self.parameter.grad is not None or self.state is USED

    def make_room(self) -> None:
        if self.state is ZERO and self.is_zero:
            self.parameter.grad, self.state = None, CLEARED
        else:
            super().make_room()

    def begin_step(self) -> None:
        stays = self.state if self.state in (USED, ZERO) else OWN
        super().begin_step()
        self.state = stays

    def consume(self) -> None:
        """A step has used what is in shards, or it is dropped; what has come since stays."""
        placed, part = isinstance(self.parameter.grad, ShardedGradient), self.part
        self.state = OWN
        self.begin_step()
        # Not where it was dropped by hand, nor where it has values again, for another optimizer.
        if placed:
            self.parameter.grad = part
            self.state = USED if part is None else OWN
            self.note()

    def abandon(self) -> None:
        """All ranks drop it. It was there, so that ``zero_grad(set_to_none=False)`` makes zeros of it."""
        was_there, self.parameter.grad = self.is_there, None
        self.state = USED if was_there else OWN
        self.begin_step()

    def place_zero(self, is_zero: bool) -> None:
        """Puts zeros into ``grad``, or what may be set to zero."""
        placed = ZeroGradient(self.parameter, self.name)
        placed.is_zero = is_zero
        self.parameter.grad, self.state = placed, ZERO

    def end_clearing(self) -> None:
        """Gradients have been cleared; zeros that were placed before, and not set to zero, go again."""
        gradient = self.parameter.grad
        if self.state is ZERO and gradient is None:
            self.state = OWN
        elif self.state is ZERO and isinstance(gradient, ZeroGradient) and not gradient.is_zero:
            self.parameter.grad, self.state = None, USED
