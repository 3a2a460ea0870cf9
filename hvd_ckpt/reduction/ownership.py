"""Parameters of several optimizers: which of these reduces a gradient, and which gradients are reduced already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.reduction.accumulation import GradientHooks

__all__ = [
    "TurnTaker",
]

# Several optimizers of one parameter: it belongs to the one that was made or synchronized last.
#
# What a new optimizer takes over it has for itself, so its gradients leave during the backward pass at once. If an older one
# is synchronized after that, it takes its parameters back: first the owner leaves nothing in flight. Optimizers that take
# turns let the gradients of what they share leave in ``synchronize()``, until one of them is used twice in a row.


class TurnTaker(ABC):
    """A reducer, as far as it shares parameters with those of other optimizers."""

    active: bool
    _hooks: GradientHooks
    _identity: int
    _generation: int

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

    @property
    def naming(self) -> tuple[int, int]:
        """Identity and generation, as :meth:`rename` has set them."""
        return self._identity, self._generation

    def rename(self, identity: int, generation: int) -> None:
        """Names this optimizer's tensors; the same on every rank."""
        self._identity, self._generation = identity, generation
        self._name_tensors(f"hvd_ckpt.{identity}.{generation}")

    @abstractmethod
    def _name_tensors(self, prefix: str) -> None: ...


# Gradients that are sums over the ranks already: added up again, they would count once per rank.
#
# A gradient may be reduced a second time: by another optimizer of the same parameter, or because a backward pass has added to it
# before it was cleared. The average of equal gradients is what they are; with ``op=Sum`` one rank brings the sum that there is,
# and the others bring what has come since.


_ATTRIBUTE = "_summed_by_hvd_ckpt"


class _Sum(TypedDict):
    """Over which ranks a gradient is summed, and what it was before a backward pass added to it.

    Plain data, since it is copied and saved with the gradient.
    """

    process_set: int
    before: torch.Tensor | None


def mark_summed(gradient: torch.Tensor, process_set: Any) -> None:
    """Remembers that a gradient is the sum over the ranks of a process set; as long as it is this tensor."""
    setattr(gradient, _ATTRIBUTE, _Sum(process_set=process_set.process_set_id, before=None))


def copied(gradient: torch.Tensor, to: torch.Tensor) -> None:
    """A gradient lies in another tensor now, which may have been a sum before."""
    known = getattr(gradient, _ATTRIBUTE, None)
    if known is not None:
        setattr(to, _ATTRIBUTE, known)
    elif hasattr(to, _ATTRIBUTE):
        delattr(to, _ATTRIBUTE)


def forget_sums(groups: Sequence[Mapping[str, Any]]) -> None:
    """The gradients of an optimizer's parameter groups have been cleared."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                vars(parameter.grad).pop(_ATTRIBUTE, None)


def keep_sum(gradient: torch.Tensor) -> None:
    """A backward pass may be about to add to a gradient."""
    known: _Sum | None = getattr(gradient, _ATTRIBUTE, None)
    if known is not None and known["before"] is None:
        known["before"] = gradient.detach().clone()


def leave_own_part(gradient: torch.Tensor, process_set: Any, brings_sum: bool) -> None:
    """Makes a gradient, in place, what this rank is to bring to a sum over the ranks of a process set.

    Args:
        brings_sum: whether this is the rank that brings what is summed already.
    """
    known: _Sum | None = vars(gradient).pop(_ATTRIBUTE, None)
    sets = (process_set.process_set_id, global_process_set.process_set_id)
    if known is None or brings_sum or known["process_set"] not in sets:
        return
    with torch.no_grad():
        if known["before"] is None:
            gradient.zero_()
        else:
            gradient.sub_(known["before"])
