"""Cross entropy over a split vocabulary: no part ever has the logits of all tokens, not even of one row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.parallel.tensor.functions import enter
from hvd_ckpt.processes import parts
from hvd_ckpt.utils.torch_private import assert_async


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

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Places of tokens or targets within the slice, and whether they are there; elsewhere the place is 0.

        Raises:
            IndexError: a token is not in the whole vocabulary. On a GPU it is an assertion of the device, as with a whole layer.
        """
        if tokens.device.type == "cpu" and tokens.numel():
            least, greatest = (int(bound) for bound in torch.aminmax(tokens))
            if least < 0 or greatest >= self.size:
                raise IndexError(
                    f"token {least if least < 0 else greatest} is outside of the vocabulary of {self.size} tokens, which is split "
                    f"over the parts; give tokens and targets from 0 to {self.size - 1}"
                )
        elif tokens.device.type == "cuda":
            assert_async(((tokens >= 0) & (tokens < self.size)).all(), "a token is outside of the vocabulary")
        here = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).masked_fill(~here, 0), here

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
        scores = shifted.gather(1, place).masked_fill(~here, 0.0)
        sums = torch.cat([shifted.exp().sum(-1, keepdim=True), scores, shifted.sum(-1, keepdim=True)], -1)
        exponentials, of_targets, of_all = torch.split(parts.add(sums), 1, -1)
        norm = exponentials.log()
        return shifted.sub_(norm), of_targets - norm, of_all / self.size - norm
