"""Several optimizers of one parameter: it belongs to the one that was made or synchronized last.

What a new optimizer takes over it has for itself, so its gradients leave during the backward pass at once. If an older one is
synchronized after that, it takes its parameters back: first the owner leaves nothing in flight. Optimizers that take turns let the
gradients of what they share leave in ``synchronize()``, until one of them is used twice in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hvd_ckpt.reduction.hooks import GradientHooks

__all__ = ["TurnTaker"]


class TurnTaker(ABC):
    """A reducer, as far as it shares parameters with those of other optimizers."""

    active: bool
    _hooks: GradientHooks

    def begin(self, optimizer: Any) -> None:
        """Makes all parameters this optimizer's. To be called on every rank."""
        self._hooks.begin(optimizer)

    def interrupt(self) -> None:
        """Another optimizer begins with parameters of this one: a step that has begun is dropped. To be called on every rank."""
        if self.active:
            self.abandon()
        else:
            identity, generation = self.naming
            self.rename(identity, generation + 1)

    def take_turn(self) -> bool:
        """Takes back the parameters that another optimizer has been made or synchronized for since the last turn.

        To be called before each synchronization, on every rank; collective where there are any.

        Returns:
            Whether there are any.
        """
        owners = self._hooks.owners()
        for owner in owners:
            owner.give_way()
        if owners:
            self._hooks.take_back()
        else:
            self.have_alone()
        return bool(owners)

    @abstractmethod
    def settle(self) -> None:
        """Leaves nothing in flight, since another optimizer is to have the gradients of this step. Collective."""

    @abstractmethod
    def lose(self, indices: Sequence[int]) -> None:
        """Parameters belong to another optimizer now; taken back, they leave in synchronization only, until :meth:`have_alone`."""

    @abstractmethod
    def have_alone(self) -> None:
        """Two turns in a row were this reducer's."""

    @abstractmethod
    def abandon(self) -> None: ...

    @abstractmethod
    def rename(self, identity: int, generation: int) -> None: ...

    @property
    @abstractmethod
    def naming(self) -> tuple[int, int]: ...
