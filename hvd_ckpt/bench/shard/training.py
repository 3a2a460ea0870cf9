"""What is trained: a GPT-lite on the bytes of a text, with micro-batches of one sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.data.tokens import Tokens
from hvd_ckpt.models.chain import Chain
from hvd_ckpt.models.gpt import GPTBlock, gpt

__all__ = ["LEARNING_RATE", "Samples", "Training", "blocks", "build", "loss"]

LEARNING_RATE = 1e-3
VOCABULARY = 320  # bytes, and a separator of files; a multiple of 64
SEED = 0
STRIDE = 7919  # windows from one sample to the next; prime, so that all windows have their turn


@dataclass(frozen=True)
class Training:
    """A GPT-lite and its steps.

    Attributes:
        width: features of a hidden state; ``heads`` divide it.
        layers: decoder layers.
        length: tokens of a sample.
        passes: micro-batches of a step on each rank.
        bucket_mb: largest bucket of gradients, in MiB.
        text: a file; None for the source text of the Python standard library.
    """

    width: int
    layers: int
    heads: int
    length: int
    passes: int
    bucket_mb: float
    text: str | None = None


def build(training: Training) -> Chain:
    """The model at the start, the same on every rank and for every configuration."""
    torch.manual_seed(SEED)
    return gpt(
        vocabulary=VOCABULARY,
        length=training.length,
        width=training.width,
        heads=training.heads,
        layers=training.layers,
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """Its decoder layers, which are recomputed and gathered as units."""
    return [module for module in model.modules() if isinstance(module, GPTBlock)]


def loss(model: nn.Module, sample: Tensor) -> Tensor:
    """The cross-entropy of each next token of a sample (1, length + 1)."""
    scores = model(sample[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), sample[:, 1:].flatten())


class Samples:
    """Windows of a text, dealt to steps, micro-batches and ranks in turn.

    Raises:
        ValueError: the text cannot be read, or is shorter than a sample.
    """

    def __init__(self, training: Training, rank: int, ranks: int) -> None:
        self._array = Tokens(training.text).array
        self._length, self._passes, self._rank, self._ranks = training.length, training.passes, rank, ranks
        self._windows = (len(self._array) - 1) // training.length
        if self._windows < 1:
            raise ValueError(
                f"the text has {len(self._array)} bytes, fewer than one sample of {training.length}: give more"
            )

    def step(self, number: int) -> list[Tensor]:
        """This rank's samples of a step."""
        first = number * self._passes
        return [self.sample((first + each) * self._ranks + self._rank) for each in range(self._passes)]

    def sample(self, number: int) -> Tensor:
        """Tokens (1, length + 1); neighbours in number are far apart in the text."""
        start = number * STRIDE % self._windows * self._length
        return torch.from_numpy(self._array[start : start + self._length + 1].astype("int64"))[None]
