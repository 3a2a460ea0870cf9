"""Samples of text for the three ways to train a language model: causal, masked, and in permuted order.

A sample is a window of the text; windows do not overlap, and every token of the text but those of a short end is in one. Masks and
orders are drawn by NumPy for each sample from seed, epoch and sample. transformers' collators draw from one generator for a whole
batch, the one for permutations even from PyTorch's global one, so that a sample would depend on those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.data.dataset import ConsecutiveSamples, Integers, Purpose, check_samples, generators
from hvd_ckpt.data.objectives import IGNORED, Batch


class _Windows(ConsecutiveSamples):
    def __init__(self, tokens: Tokens, length: int, seed: int, *, beyond: int = 0) -> None:
        """Windows of ``length`` tokens, each followed by ``beyond`` more that belong to the next one, too."""
        super().__init__(max(len(tokens) - beyond, 0) // length, seed)
        if len(self) < 2:
            raise ValueError(
                f"the text has {len(tokens)} tokens, less than two samples of {length}: give more text or shorter samples"
            )
        self.tokens = tokens
        self.length = length
        self._within = numpy.arange(length + beyond)

    def _take(self, indices: Sequence[int], epoch: Sequence[int]) -> tuple[Integers, Integers, Integers]:
        """Tokens of samples (samples, length), numbers of their windows, and the epochs."""
        which, epochs = check_samples(indices, epoch, self._count)
        which = which + self._first
        tokens = self.tokens.array[which[:, None] * self.length + self._within]
        return tokens.astype(numpy.int64), which, epochs

    def _draw(
        self, purpose: Purpose, epochs: Integers, which: Integers, count: int
    ) -> NDArray[numpy.float64]:
        """For each sample ``count`` uniform random numbers in [0, 1), (samples, count)."""
        drawn = numpy.empty((len(which), count))
        for row, random in zip(drawn, generators(purpose, self._seed, epochs, which)):
            random.random(out=row)
        return drawn


class CausalText(_Windows):
    """Each token is predicted from those before it.

    A batch's inputs are the tokens (samples, length), and its targets those that follow each, of the same shape; IGNORED after the
    end of a document, where the text has documents.

    Args:
        tokens: the text.
        length: tokens in a sample.
        seed: unused, since nothing is drawn.

    Raises:
        ValueError: the text is shorter than two samples.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        super().__init__(tokens, length, seed, beyond=1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self._take(indices, epoch)[0])
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.tokens.boundary is not None:
            targets = targets.masked_fill(inputs == self.tokens.boundary, IGNORED)
        return Batch((inputs,), targets)


class MaskedText(_Windows):
    """Some tokens are hidden, and predicted from all the others (Devlin et al., "BERT", 2018).

    A batch's inputs are the tokens (samples, length). 15 % of the positions, as many in each sample and at least one, are to be
    predicted: 80 % of them show the mask token, 10 % any ordinary token and 10 % what they are. Targets (samples, length) are
    the tokens at these positions, and IGNORED at the others. The positions change with the epoch (Liu et al., "RoBERTa", 2019).

    Args:
        tokens: the text.
        length: tokens in a sample.
        seed: of the masks.

    Raises:
        ValueError: the text is shorter than two samples.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int = 0) -> None:
        super().__init__(tokens, length, seed)
        self.predicted = max(round(0.15 * length), 1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        tokens, which, epochs = self._take(indices, epoch)
        drawn = self._draw(Purpose.MASK, epochs, which, self.length + 2 * self.predicted)
        place, fate, other = numpy.split(drawn, [self.length, self.length + self.predicted], axis=1)
        chosen = place.argpartition(self.predicted - 1, axis=1)[:, : self.predicted]
        chosen.sort(axis=1)
        truth = numpy.take_along_axis(tokens, chosen, axis=1)
        ordinary = (other * self.tokens.ordinary).astype(numpy.int64)
        shown = numpy.where(fate < 0.8, self.tokens.mask, numpy.where(fate < 0.9, ordinary, truth))
        targets = numpy.full_like(tokens, IGNORED)
        numpy.put_along_axis(targets, chosen, truth, axis=1)
        numpy.put_along_axis(tokens, chosen, shown, axis=1)
        return Batch((torch.from_numpy(tokens),), torch.from_numpy(targets))


class PermutedText(_Windows):
    """Tokens are predicted in a random order, each from those before it in that order (Yang et al., "XLNet", 2019).

    The last sixth of the tokens in the order, ``predicted`` of them, is predicted, as in the paper. They stand in spans of 1 to 5
    neighbours, of random length and at random places, any two of them apart. As in the authors' program, the tokens before those in
    the order see one another whatever their order.

    A batch's inputs are the tokens (samples, length), nothing replaced; its targets (samples, predicted) the tokens to be
    predicted, from left to right. Shared between the blocks of the model, float32:

    - ``perm_mask`` (samples, length, length), 1 where the token at the second position is not seen from the first. A token
      to be predicted is not seen from its own place: the content stream of XLNet adds that by itself.
    - ``target_mapping`` (samples, predicted, length), 1 at the position of each token to be predicted.

    Args:
        tokens: the text.
        length: tokens in a sample.
        seed: of order and spans.

    Raises:
        ValueError: the text is shorter than two samples.
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
        # The turn of each position: the context comes first, all at once.
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
    """Positions to predict (samples, predicted), ascending, in spans of these lengths; the last one is cut to fit.

    ``gap`` (samples, gaps) are random numbers for the places before, between and after the tokens that are not predicted,
    where a span may stand; the lowest of them get one, so no two spans touch.
    """
    predicted = lengths.shape[1]
    ends = lengths.cumsum(axis=1)
    tokens = numpy.arange(predicted)
    span = (ends[:, None, :] <= tokens[:, None]).sum(axis=2)  # the span that each predicted token is in
    spans = span[:, -1:] + 1
    places = numpy.where(
        gap.argsort(axis=1).argsort(axis=1) < spans, numpy.arange(gap.shape[1]), gap.shape[1]
    )
    places.sort(axis=1)
    # Before a token stand those of the context up to its gap, and the predicted ones on its left.
    return numpy.asarray(numpy.take_along_axis(places, span, axis=1) + tokens)


TEXTS: dict[str, Any] = {"causal": CausalText, "masked": MaskedText, "permutation": PermutedText}
"""By the kind of data set that a model needs."""
