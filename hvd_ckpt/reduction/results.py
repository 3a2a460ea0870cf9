"""Changes of reduced gradients, compared between the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.collectives import Collectives
from hvd_ckpt.reduction.weights import Sums
from hvd_ckpt.utils.fingerprint import fingerprint

Change = tuple[int, torch.Tensor | None]
"""A parameter's index and its gradient that was changed in place, or None where it was dropped."""


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
    digits = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest() if facts else bytes(8)
    value = torch.tensor(int.from_bytes(digits, "little", signed=True))
    asked = torch.tensor([changes is None, notice], dtype=torch.float32)
    *sums, new, notices = Collectives(process_set, name).sum(
        torch.cat([Sums.encode(value), asked]), "changes"
    )
    return new > 0 or not Sums.equal(sums, 1.0), notices > 0
