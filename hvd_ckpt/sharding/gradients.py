"""Sharded gradients: their placeholder in ``p.grad``.

Code may read a gradient between the backward pass and the step (clipping, norms for a log, noise, a check for None). It then gets
a placeholder of the right shape and without memory, and using its values is an error that says what to do. Without the placeholder
the code would find None and leave out the gradient without an error. If None or another tensor replaces it, this is detected
before the step. After the step it stays until gradients are cleared, as a gradient does in PyTorch. Nothing is left then to add to:
a later step is an error as long as they are not.
"""

from __future__ import annotations

from typing import Any

from hvd_ckpt.reduction.gradients import DROPPED, GROWING, OWN, SENT, USED, AbsentGradient, TrackedGradient
from hvd_ckpt.utils.torch_private import execution_engine

IN_SHARDS = (
    "is split over the ranks: clip with hc.clip_grad_norm_(model.parameters(), max_norm); for anything else, call "
    "optimizer.synchronize(), use the gradients of optimizer.pieces, and step within optimizer.skip_synchronize()"
)
IN_PIECES = (
    "is not in optimizer.pieces now: clip with hc.clip_grad_norm_(model.parameters(), max_norm); at stages 2 and 3, pieces have "
    "their parts of gradients between optimizer.synchronize() and optimizer.step()"
)


class ShardedGradient(AbsentGradient):
    """A gradient whose values are in the ranks' shards, or that a step has used.

    Attributes:
        is_zero: whether a gradient that was used has been set to zero since, as by ``zero_grad(set_to_none=False)``, so that it
            counts as one of zeros; None before a step has used it.
    """

    absence = "split over the ranks"
    usual = IN_SHARDS
    is_zero: bool | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_foreach_zero_":  # the list may have gradients whose values are here, too
            for gradient in args[0]:
                gradient.zero_()
            return None
        if name == "zero_" and args[0].is_zero is not None:
            args[0].is_zero = True
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class PartedGradient(TrackedGradient):
    """What stands in the ``grad`` of a parameter whose gradient goes to shards."""

    __slots__ = ("_grows",)  # has been added to what a step has used
    _kind = ShardedGradient

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._grows = False

    @property
    def _used(self) -> ShardedGradient | None:
        """The placeholder of a gradient that a step has used, where nobody has replaced it."""
        gradient = self.parameter.grad
        return gradient if self.state is USED and isinstance(gradient, ShardedGradient) else None

    @property
    def is_zero(self) -> bool:
        """Whether it is zeros, none of which has left."""
        self.settle()
        used = self._used
        return used is not None and used.is_zero is True

    @property
    def is_uncleared(self) -> bool:
        """Whether it is, or was added to, what a step has used, which nobody has cleared."""
        if not self._grows and (self.state is SENT or self.state is OWN):  # the usual case
            return False
        self.settle()
        if (used := self._used) is not None:
            return not used.is_zero
        return self._grows and self.state is not DROPPED and self.parameter.grad is not None

    def _hide(self) -> None:
        super()._hide()
        self.parameter.grad.is_zero = None  # type: ignore[union-attr]

    def make_room(self) -> None:
        self.settle()  # after a backward pass that has failed
        if (used := self._used) is not None:
            self._grows = not used.is_zero
            self._placeholder, self.parameter.grad, self.state = used, None, GROWING
            execution_engine.queue_callback(self.settle)
            return
        if self.parameter.grad is None and not self.is_away:  # cleared by hand since
            self._grows = False
        super().make_room()

    def settle(self) -> None:
        if self.state is GROWING and self.parameter.grad is None:
            self.parameter.grad, self.state = self._placeholder, USED
        super().settle()

    def begin_step(self, reduced: bool = False) -> None:
        self.settle()
        stays = USED if self._used is not None else OWN
        super().begin_step()
        self.state, self._grows = stays, False

    def consume(self) -> None:
        """A step has used what is in shards, or it is dropped; what has come since stays."""
        placed, part = self.parameter.grad, self.part
        self.state = OWN
        self.begin_step()
        # Not where it was dropped by hand, nor where it has values again, for another optimizer.
        if isinstance(placed, ShardedGradient):
            if part is None:
                placed.is_zero, self.state = False, USED
            else:
                self.parameter.grad = part
                self.note()

    def abandon(self) -> None:
        """All ranks drop it."""
        self.parameter.grad, self.state = None, OWN
        self.begin_step()

    def place_used(self, is_zero: bool) -> None:
        """Puts what a step has used into ``grad``, or zeros."""
        self._hide()
        self.parameter.grad.is_zero, self.state = is_zero, USED  # type: ignore[union-attr]
