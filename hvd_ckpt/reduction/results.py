"""The results of a synchronization, with which later changes of gradients are detected: new, dropped and changed in place."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.collectives import Collectives
from hvd_ckpt.utils.fingerprint import fingerprint

Change = tuple[int, torch.Tensor | None]
"""A parameter's index and its gradient that was changed in place, or None where it was dropped."""


class Results:
    """The gradients after the last synchronization.

    Usually each is its view into a bucket, and the version of the view is all that must be kept.

    Args:
        assignment: the buckets.
    """

    def __init__(self, assignment: BucketAssignment) -> None:
        self._assignment = assignment
        self._used: list[int] = []
        # Gradients that are not in buckets, with their versions. Held weakly: a dropped one is freed at once, and
        # no new one passes for it, as it could if its ``id`` were kept.
        self._others: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def clear(self) -> None:
        """There are no gradients any more."""
        self._used = []
        self._others.clear()

    def note(self, used: list[int], all_in_buckets: bool) -> None:
        """A synchronization is over.

        Args:
            used: the parameters that have a gradient.
            all_in_buckets: each of them is known to lie in its bucket.
        """
        self._used = used
        self._others.clear()
        for bucket in self._assignment.buckets:
            bucket.note_versions()
        for index in () if all_in_buckets else used:
            gradient, entry = self._assignment.parameters[index].grad, self._assignment.entry_of[index]
            if gradient is not None and (entry is None or gradient is not entry.view):
                self._others[index] = weakref.ref(gradient), gradient._version

    def note_changes(self) -> None:
        """All ranks have changed gradients in place in the same way, which now count as results of the last synchronization."""
        for bucket in self._assignment.buckets:
            bucket.note_versions()
        for index, (reference, _) in self._others.items():
            gradient = reference()
            if gradient is not None:
                self._others[index] = reference, gradient._version

    def changes(self) -> list[Change] | None:
        """The gradients that were dropped or changed in place since; None if there is a new one."""
        changed: list[Change] = []
        used = set(self._used)
        for index, parameter in enumerate(self._assignment.parameters):
            gradient = parameter.grad
            if gradient is None:
                if index in used:
                    changed.append((index, None))
                continue
            version = self._version(index, gradient)
            if version is None:
                return None
            if version != gradient._version:
                changed.append((index, gradient))
        return changed

    def _version(self, index: int, gradient: torch.Tensor) -> int | None:
        """The version that a gradient had after the synchronization; None if it is another tensor."""
        entry = self._assignment.entry_of[index]
        if entry is not None and gradient is entry.view:
            return entry.version
        if index not in self._others:
            return None
        reference, version = self._others[index]
        return version if reference() is gradient else None


DIGITS = 8  # of a hash, of 8 bits each


def changed_apart(
    changes: Sequence[Change] | None, notice: bool, name: str, process_set: Any
) -> tuple[bool, bool]:
    """Whether some rank has a new gradient (None), or the ranks have changed theirs in different ways; whether any has a notice.

    Gradients that were changed in place are compared by their fingerprints. Collective: one small allreduce, from which ranks
    that have called ``join()`` may be absent.
    """
    facts = [
        (index, None if gradient is None else int(fingerprint(gradient))) for index, gradient in changes or ()
    ]
    digits = hashlib.blake2b(repr(facts).encode(), digest_size=DIGITS).digest() if facts else bytes(DIGITS)
    # Added up in float64, where these whole numbers are exact. A rank that has joined brings zeros, and counts as no rank.
    own = [1, changes is None, notice, *digits, *(digit * digit for digit in digits)]
    ranks, new, notices, *sums = Collectives(process_set, name).sum(
        torch.tensor(own, dtype=torch.float64), "changes"
    )
    # The digits of n ranks are equal if and only if n times the sum of their squares is the square of their sum.
    pairs = zip(sums[:DIGITS], sums[DIGITS:])
    apart = new > 0 or any(ranks * squares != digit * digit for digit, squares in pairs)
    return bool(apart), bool(notices > 0)
