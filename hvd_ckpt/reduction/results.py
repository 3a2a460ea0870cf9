"""Changes of reduced gradients, compared between the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.collectives import Collectives
from hvd_ckpt.utils.fingerprint import fingerprint

Change = tuple[int, torch.Tensor | None]
"""A parameter's index and its gradient that was changed in place, or None where it was dropped."""


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
