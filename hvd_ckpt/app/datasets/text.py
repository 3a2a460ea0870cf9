"""Samples of text for three training objectives of language models: causal, masked and permuted.

A sample is a window of the text. Windows do not overlap, and each token is in one, except for a short end of the text. NumPy draws
masks and orders for each sample from seed, epoch and sample. The collators of transformers draw from one generator for a whole
batch, and the one for permutations from PyTorch's global generator, so that a sample would depend on earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.data.dataset import Integers, NumberedSamples, Purpose, generator
from hvd_ckpt.data.objectives import IGNORED, Batch


class _Windows(NumberedSamples):
    """Windows of a text.

    Args:
        length: number of tokens in a sample.
        seed: seed of what is drawn for a sample.

    Raises:
        ValueError: the text is shorter than two samples.
    """

    split_at_random = False
    beyond = 0  # tokens of the next window that a sample has as well

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        super().__init__(max(len(tokens) - self.beyond, 0) // length, seed)
        if len(self) < 2:
            raise ValueError(
                f"the text has {len(tokens)} tokens, less than two samples of {length}: give more text or shorter samples"
            )
        self.tokens = tokens
        self.length = length
        self._within = numpy.arange(length + self.beyond)

    def _take(self, indices: Sequence[int], epoch: Sequence[int]) -> tuple[Integers, Integers, Integers]:
        """Tokens of samples (samples, length), numbers of their windows, and epochs."""
        which, epochs = self._find(indices, epoch)
        # Windows of length 4 that see 1 token beyond: window 0 has the tokens 0 to 4, window 1 the tokens 4 to 8.
        tokens = self.tokens.array[which[:, None] * self.length + self._within]
        return tokens.astype(numpy.int64), which, epochs

    def _draw(
        self, purpose: Purpose, epochs: Integers, which: Integers, count: int
    ) -> NDArray[numpy.float64]:
        """Uniform random numbers in [0, 1) for each sample, (samples, count)."""
        drawn = numpy.empty((len(which), count))
        for row, at, sample in zip(drawn, epochs, which):
            generator(purpose, self._seed, at, sample).random(out=row)
        return drawn


class CausalText(_Windows):
    """Causal samples: each token is predicted from the tokens before it.

    The inputs of a batch are the tokens (samples, length). Its targets are the next tokens, of the same shape; IGNORED after the
    end of a document, if the text has documents.
    """

    beyond = 1

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self._take(indices, epoch)[0])
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.tokens.boundary is not None:
            targets = targets.masked_fill(inputs == self.tokens.boundary, IGNORED)
        return Batch((inputs,), targets)


class MaskedText(_Windows):
    """Masked samples: some tokens are hidden, and predicted from all others (Devlin et al., "BERT", 2018).

    The inputs of a batch are the tokens (samples, length). 15 % of the positions are predicted, the same number in each sample and
    at least one. 80 % of them show the mask token, 10 % a random ordinary token and 10 % their own token. Targets (samples,
    length) are the tokens at these positions, and IGNORED at the others. The positions differ between epochs (Liu et al.,
    "RoBERTa", 2019).
    """

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        super().__init__(tokens, length, seed)
        self.predicted = max(round(0.15 * length), 1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        tokens, which, epochs = self._take(indices, epoch)
        # One draw for a sample: which positions, what each of them shows, and its
        # random token. In another order, a seed would mean other masks.
        drawn = self._draw(Purpose.MASK, epochs, which, self.length + 2 * self.predicted)
        place, fate, other = numpy.split(drawn, [self.length, self.length + self.predicted], axis=1)
        chosen = place.argpartition(self.predicted - 1, axis=1)[:, : self.predicted]
        # argpartition() leaves the order of the chosen positions open.
        # Sorted, each fate belongs to one of them in all versions of NumPy.
        chosen.sort(axis=1)
        truth = numpy.take_along_axis(tokens, chosen, axis=1)
        ordinary = (other * self.tokens.ordinary).astype(numpy.int64)
        shown = numpy.where(fate < 0.8, self.tokens.mask, numpy.where(fate < 0.9, ordinary, truth))
        targets = numpy.full_like(tokens, IGNORED)
        numpy.put_along_axis(targets, chosen, truth, axis=1)
        numpy.put_along_axis(tokens, chosen, shown, axis=1)
        return Batch((torch.from_numpy(tokens),), torch.from_numpy(targets))


class PermutedText(_Windows):
    """Permuted samples: tokens are predicted in a random order, each from the earlier ones (Yang et al., "XLNet", 2019).

    The last sixth of the tokens in the order, ``predicted`` of them, is predicted, as in the paper. They form spans of 1 to 5
    neighbours with random lengths and places, which do not touch. As in the program of the authors, all other tokens see each
    other.

    The inputs of a batch are the unchanged tokens (samples, length). Its targets (samples, predicted) are the predicted tokens,
    from left to right. The blocks of the model share two float32 tensors:

    - ``perm_mask`` (samples, length, length) is 1 if the first position does not see the token at the second. A predicted token is
      not seen from its own position; the content stream of XLNet adds that itself.
    - ``target_mapping`` (samples, predicted, length) is 1 at the position of each predicted token.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        super().__init__(tokens, length, seed)
        self.predicted = max(length // 6, 1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        tokens, which, epochs = self._take(indices, epoch)
        gaps = self.length - self.predicted + 1
        drawn = self._draw(Purpose.PERMUTATION, epochs, which, 2 * self.predicted + gaps)
        spans, gap, order = numpy.split(drawn, [self.predicted, self.predicted + gaps], axis=1)
        positions = _spans(1 + (spans * 5).astype(numpy.int64), gap)
        # The turn of each position: the second argsort() makes ranks of the first one's order. All positions of the context have
        # the first turn, -1.
        turn = numpy.full(tokens.shape, -1, dtype=numpy.int16 if self.length < 1 << 15 else numpy.int64)
        numpy.put_along_axis(
            turn, positions, order.argsort(axis=1).argsort(axis=1).astype(turn.dtype), axis=1
        )
        hidden = (turn[:, :, None] <= turn[:, None, :]) & (turn >= 0)[:, None, :]
        mapping = numpy.zeros((len(tokens), self.predicted, self.length), dtype=numpy.float32)
        numpy.put_along_axis(mapping, positions[:, :, None], 1, axis=2)
        targets = numpy.take_along_axis(tokens, positions, axis=1)
        return Batch(
            (torch.from_numpy(tokens),),
            torch.from_numpy(targets),
            {"perm_mask": torch.from_numpy(hidden).float(), "target_mapping": torch.from_numpy(mapping)},
        )


def _spans(lengths: Integers, gap: NDArray[numpy.float64]) -> Integers:
    """Positions to predict (samples, predicted), ascending, in spans of these lengths. The last span is cut to fit.

    ``gap`` (samples, gaps) has a random number for each gap before, between and after the tokens of the context. The gaps with the
    lowest numbers get one span each, so no two spans touch.
    """
    # An example with 3 predicted tokens of 7 and lengths of 2, 5, ...: the tokens are in the spans 0, 0 and 1. The two gaps with
    # the lowest numbers be 1 and 3 (of 5, around 4 tokens of context). So the positions are 1 + 0, 1 + 1 and 3 + 2:
    #
    #     position    0 1 2 3 4 5 6
    #     predicted     x x     x
    predicted = lengths.shape[1]
    ends = lengths.cumsum(axis=1)
    tokens = numpy.arange(predicted)
    span = (ends[:, None, :] <= tokens[:, None]).sum(axis=2)  # the span of each predicted token
    spans = span[:, -1:] + 1
    places = numpy.where(
        gap.argsort(axis=1).argsort(axis=1) < spans, numpy.arange(gap.shape[1]), gap.shape[1]
    )
    places.sort(axis=1)
    # In front of a token are the tokens of the context up to its gap, and the predicted tokens on its left.
    return numpy.asarray(numpy.take_along_axis(places, span, axis=1) + tokens)


TEXTS: dict[str, Any] = {"causal": CausalText, "masked": MaskedText, "permutation": PermutedText}
"""Classes of samples by the kind of data set that a model needs."""
