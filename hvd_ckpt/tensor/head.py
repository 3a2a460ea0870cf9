"""Cross entropy over a split vocabulary: no part ever has the logits of all tokens, not even of one row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.processes import parts
from hvd_ckpt.tensor.functions import enter


class SplitVocabulary(NamedTuple):
    """A slice of the vocabulary: its first and last + 1 token, and the size of the whole.

    It is what :func:`hvd_ckpt.chunked_cross_entropy` asks a vocabulary parallel head for.
    """

    start: int
    stop: int
    size: int

    def entering(self, hidden: Tensor) -> Tensor:
        """The head's input, whose gradients are summed over the parts, once for all chunks."""
        return enter(hidden)

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Places of the targets within the slice, and whether they are there; elsewhere the place is 0."""
        here = (targets >= self.start) & (targets < self.stop)
        return (targets - self.start).masked_fill(~here, 0), here

    def log_softmax(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithms of probabilities: the slice's (rows, slice), the targets' (rows, 1), and the mean of all tokens' (rows, 1).

        Two messages of three numbers a row in all. Collective over the parts.

        Args:
            logits: logits of the slice.
            targets: (rows, 1), of the whole vocabulary.
        """
        # By the maximum of all parts, so that exponentials of different slices can be added.
        shifted = logits - parts.maximum(logits.amax(-1, keepdim=True))
        place, here = self.local(targets)
        # Zero where another part has the target, so that the sum over the parts is the target's score.
        own = shifted.gather(1, place).masked_fill(~here, 0.0)
        sums = torch.cat([shifted.exp().sum(-1, keepdim=True), own, shifted.sum(-1, keepdim=True)], -1)
        exponentials, of_targets, of_all = torch.split(parts.add(sums), 1, -1)
        norm = exponentials.log()
        return shifted.sub_(norm), of_targets - norm, of_all / self.size - norm
