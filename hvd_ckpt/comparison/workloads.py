"""The workloads: a model as a chain of blocks, its batches, and the loss.

To add one, write a class with these methods and enter it in :data:`WORKLOADS`; engines, reference and report take it
from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.comparison.data import IGNORED, PADDING, VOCABULARY, Digits, Text

__all__ = ["SCALES", "WORKLOADS", "Batch", "Workload", "make_workload"]

SCALES = ("quick", "default", "full")


@dataclass
class Batch:
    """What one rank trains on in one step: the chain's inputs, keyword arguments of every block, and the target."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    shared: dict[str, Any] = field(default_factory=dict)


class Workload(ABC):
    """A model learning something real.

    Attributes:
        title: one line that says what learns what.
        model_line: one line with the model's size, at this scale.
    """

    title: ClassVar[str]
    model_line: str
    learning_rate: ClassVar[float]

    @abstractmethod
    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        """Read the data and import what the model needs, so that no step waits for either."""

    @abstractmethod
    def model(self) -> nn.Sequential:
        """A fresh model in training mode, initialized from torch's global random state."""

    @abstractmethod
    def batch(self, rank: int, size: int, step: int) -> Batch:
        """The batch of one rank in one step: a pure function of its arguments and the seed."""

    @abstractmethod
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of one rank's batch."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum, whose update is linear in the gradient: a rounding error stays a rounding error. (Adam
        divides by the gradient's own size and blows up the rounding of a gradient that should be zero.)"""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)


class DenseNetOnDigits(Workload):
    """A DenseNet on handwritten digits: batch norms everywhere, many small parameters."""

    title = "DenseNet on handwritten digits"
    learning_rate = 0.1
    # depth, pixels, images per rank and step
    sizes: ClassVar[dict[str, tuple[int, int, int]]] = {
        "quick": (22, 8, 4),
        "default": (22, 24, 16),
        "full": (264, 64, 8),
    }

    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        from hvd_ckpt.models.densenet import densenet

        self._densenet = densenet
        self._depth, pixels, self._images = self.sizes[scale]
        self._digits = Digits(pixels, seed)
        self.model_line = f"DenseNet-{self._depth}, {self._images} images of {pixels} x {pixels} per rank"

    def model(self) -> nn.Sequential:
        return self._densenet(self._depth, channels=1, classes=Digits.classes).train()

    def batch(self, rank: int, size: int, step: int) -> Batch:
        images, labels = self._digits.batch(rank, size, step, self._images)
        # PyTorch's reentrant variant drops the first segment's gradients unless an input requires one; its
        # documentation's way out, taken here for every engine alike.
        return Batch((images.requires_grad_(),), labels)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)


class BertOnText(Workload):
    """A BERT guessing hidden bytes of real text: dropout, a shared mask, tied weights, inputs without gradients."""

    title = "BERT learning masked words of text"
    learning_rate = 0.05
    # hidden size, layers, heads, longest sequence, sequences per rank and step
    sizes: ClassVar[dict[str, tuple[int, int, int, int, int]]] = {
        "quick": (32, 2, 2, 32, 4),
        "default": (64, 4, 4, 64, 8),
        "full": (768, 12, 12, 512, 8),
    }

    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        from hvd_ckpt.models import bert

        self._bert = bert
        self._hidden, self._layers, self._heads, self._length, self._sequences = self.sizes[scale]
        self._text = Text(text, self._length, seed)
        self.model_line = (
            f"BERT of {self._layers} layers, hidden size {self._hidden}, dropout 0.1, "
            f"{self._sequences} sequences of up to {self._length} bytes per rank"
        )

    def model(self) -> nn.Sequential:
        return self._bert.bert(
            self._bert.bert_config(
                vocabulary=VOCABULARY,
                padding=PADDING,
                hidden=self._hidden,
                layers=self._layers,
                heads=self._heads,
                length=self._length,
                dropout=0.1,
            )
        )

    def batch(self, rank: int, size: int, step: int) -> Batch:
        tokens, mask, targets = self._text.batch(rank, step, self._sequences)
        return Batch((tokens,), targets, {"attention_mask": mask})

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


WORKLOADS: dict[str, type[Workload]] = {"densenet": DenseNetOnDigits, "bert": BertOnText}


def make_workload(name: str, scale: str, seed: int, text: str | None) -> Workload:
    """The workload of that name at one of :data:`SCALES`; ``text`` is a file for those that read text."""
    return WORKLOADS[name](scale, seed, text)
