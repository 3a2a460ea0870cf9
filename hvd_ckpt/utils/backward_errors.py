"""Errors of one rank's backward pass, raised on every rank by the reduction that follows it.

An error that one rank alone raises in its backward pass leaves the others waiting for its gradients. Whoever is to communicate
after the pass registers here; whoever finds an error at its end hands it over.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class RaisesOnAll(Protocol):
    """An object that communicates after a backward pass."""

    def take_over(self, error: Exception) -> bool:
        """Whether it will raise the error on every rank."""


_registered: weakref.WeakSet[RaisesOnAll] = weakref.WeakSet()


def register(reducer: RaisesOnAll) -> None:
    """Adds an object, held weakly, that errors may be handed to."""
    _registered.add(reducer)


def hand_over(error: Exception) -> bool:
    """Whether a registered object will raise the error on every rank; if not, the caller raises it."""
    return any(reducer.take_over(error) for reducer in list(_registered))
