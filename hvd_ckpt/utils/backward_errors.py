"""Errors of one rank's backward pass, raised on every rank by the reduction that follows it.

An error that one rank alone raises in its backward pass leaves the others waiting for its gradients. Code that communicates after
the pass registers here, and code that finds an error at its end hands it over.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class RaisesOnAll(Protocol):
    """An object that communicates after a backward pass.

    Attributes:
        last_forward: :func:`last_forward` when its last gradient arrived.
    """

    last_forward: int

    def take_over(self, error: Exception) -> bool:
        """Whether it will raise the error on every rank."""


_registered: weakref.WeakSet[RaisesOnAll] = weakref.WeakSet()
_last_forward = 0


def register(reducer: RaisesOnAll) -> None:
    """Adds an object, held weakly, that errors may be handed to."""
    _registered.add(reducer)


def begin_forward() -> int:
    """The number of a forward pass whose backward pass may end in an error."""
    global _last_forward
    _last_forward += 1
    return _last_forward


def last_forward() -> int:
    """The number of the last such forward pass."""
    return _last_forward


def hand_over(error: Exception, forward: int) -> bool:
    """Whether a registered object will raise the error on every rank; if not, the caller raises it.

    All that have got gradients since the forward pass of that number take it over: of several, as those of a GAN, each may be the
    one that steps. One that got its last gradient before has no part in this backward pass, and may never communicate again.
    """
    concerned = [reducer for reducer in _registered if reducer.last_forward >= forward]
    taken_over = [reducer.take_over(error) for reducer in concerned]  # each has to hear of it
    return any(taken_over)
