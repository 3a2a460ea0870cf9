"""Workloads: a model as a chain of blocks, its batches, the loss, and the passes of a step; and those on real data.

To add one, write a subclass with a name: ``class Mine(Workload, name="mine")``. The small ones that each show one difficulty are
in :mod:`.scenarios`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.app.compare.cells import Chain, Recompute, TrainingSettings
from hvd_ckpt.app.datasets.images import Digits
from hvd_ckpt.app.datasets.text import MaskedText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.data.objectives import IGNORED, Batch

if TYPE_CHECKING:
    from hvd_ckpt.app.compare.training import Training

CATALOG: dict[str, type[Workload]] = {}
"""Every workload by its name, as soon as its module is imported."""


class Workload(ABC):
    """A model learning something; a class with a ``name`` is in the :data:`CATALOG`.

    Attributes:
        title: one line that says what learns what.
        model_line: one line with the model's size, at this scale.
        requires: optional packages that it needs.
        variants: the ways to recompute that mean something for it.
        parts: batches of a rank in a step.
        passes: most backward passes in a step, for engines that need the number.
        small: a step takes milliseconds.
        static: the same graph in every step, so that each gradient takes part in exactly one reduction.
        scales_loss: the loss is scaled, and a step skipped on overflow, in any precision.
        uneven: ranks have unequal numbers of steps.
        precisions: those that mean something for it; None for all.
        tolerance: how far weights may be off, as a share of what training changes.
    """

    title: ClassVar[str]
    model_line: str
    learning_rate: ClassVar[float]
    requires: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[str, ...]] = ("none", "reentrant", "non-reentrant")
    parts: ClassVar[int] = 1
    passes: ClassVar[int] = 1
    small: ClassVar[bool] = False
    static: ClassVar[bool] = True
    scales_loss: ClassVar[bool] = False
    uneven: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...] | None] = None
    tolerance: ClassVar[float] = 1e-3  # a lost or doubled gradient is off by a tenth or more

    def __init_subclass__(cls, name: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if name:
            CATALOG[name] = cls

    @abstractmethod
    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        """Read the data and import what the model needs, so that no step waits for either."""

    @abstractmethod
    def model(self, recompute: Recompute) -> nn.Module:
        """A fresh model in training mode, initialized from torch's global random state; ``len`` gives its blocks."""

    @abstractmethod
    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        """A batch of one rank in one step: a pure function of its arguments and the seed."""

    @abstractmethod
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""

    def batches(self, rank: int, size: int, step: int) -> list[Batch]:
        """All batches of one rank in one step."""
        return [self.batch(rank, size, step, part) for part in range(self.parts)]

    def run(self, step: Training) -> list[torch.Tensor]:
        """The forward and backward passes of a step; returns its losses."""
        losses = []
        for batch in step.batches:
            loss = self.loss_of(step, batch)
            step.backward(loss)
            losses.append(loss.detach())
        return losses

    def loss_of(self, step: Training, batch: Batch, **how: Any) -> torch.Tensor:
        """The forward pass of a batch and its loss; ``how`` is for the model, which also gets what its layers share."""
        with step.autocast():
            return self.loss(step.model(*batch.inputs, **batch.shared, **how), batch.targets)

    def before_step(self, model: nn.Module, number: int) -> None:  # noqa: B027  # most change nothing
        """Changes the (unwrapped) model before a step."""

    def steps_of(self, rank: int, size: int, steps: int) -> int:
        """How many of ``steps`` steps a rank has batches for."""
        return steps

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum, whose update is linear in the gradient: a rounding error stays a rounding error. (Adam
        divides by the gradient's own size and blows up the rounding of a gradient that should be zero.)"""
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)


class DenseNetOnDigits(Workload, name="densenet"):
    """A DenseNet on handwritten digits: batch norms everywhere, many small parameters."""

    title = "DenseNet on handwritten digits"
    requires = ("sklearn",)
    learning_rate = 0.1
    # depth, pixels, images per rank and step
    sizes: ClassVar = {"quick": (22, 16, 8), "default": (22, 24, 16)}

    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        from hvd_ckpt.app.models.densenet import densenet

        self._densenet = densenet
        self._depth, pixels, self._images = self.sizes[scale]
        self._digits = Digits(pixels, seed=seed)
        self._order = numpy.random.default_rng(seed).permutation(len(self._digits))
        self.model_line = f"DenseNet-{self._depth}, {self._images} images of {pixels} x {pixels} per rank"

    def model(self, recompute: Recompute) -> nn.Module:
        return Chain(list(self._densenet(self._depth, channels=1, classes=self._digits.classes)), recompute)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        first = (step * size + rank) * self._images
        indices = self._order[numpy.arange(first, first + self._images) % len(self._order)]
        batch = self._digits.batch(indices.tolist(), [0] * self._images)
        # PyTorch's reentrant variant drops the first segment's gradients unless an input requires one; its
        # documentation's way out, taken here for every engine alike.
        batch.inputs[0].requires_grad_()
        return batch

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)


class Maskless(nn.Module):
    """A block without use for the mask that every layer of a chain is given here."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class BertOnText(Workload, name="bert"):
    """A BERT guessing hidden bytes of real text: dropout, a shared mask, tied weights, inputs without gradients."""

    title = "BERT learning masked words of text"
    requires = ("transformers",)
    learning_rate = 0.05
    # hidden size, layers, heads, longest sequence, sequences per rank and step
    sizes: ClassVar = {"quick": (32, 2, 2, 32, 4), "default": (64, 4, 4, 64, 8)}

    def __init__(self, scale: str, seed: int, text: str | None) -> None:
        from hvd_ckpt.app.models.transformer import bert

        self._bert = bert
        self._hidden, self._layers, self._heads, self._length, self._sequences = self.sizes[scale]
        self._seed = seed
        self._tokens = Tokens(text)
        self._text = MaskedText(self._tokens, self._length, seed)
        self.model_line = (
            f"BERT of {self._layers} layers, hidden size {self._hidden}, dropout 0.1, "
            f"{self._sequences} sequences of up to {self._length} bytes per rank"
        )

    def model(self, recompute: Recompute) -> nn.Module:
        model = self._bert(
            vocabulary=self._tokens.vocabulary,
            padding=self._tokens.padding,
            width=self._hidden,
            layers=self._layers,
            heads=self._heads,
            length=self._length,
            dropout=0.1,
        )
        embeddings, *layers, head = model.to_layers()
        return Chain([Maskless(embeddings), *layers, Maskless(head)], recompute)

    def batch(self, rank: int, size: int, step: int, part: int = 0) -> Batch:
        random = numpy.random.default_rng([self._seed, rank, step])
        windows = random.integers(len(self._text), size=self._sequences)
        batch = self._text.batch(windows.tolist(), [step] * self._sequences)
        lengths = random.integers(self._length // 2, self._length + 1, size=(self._sequences, 1))
        padding = torch.arange(self._length) >= torch.from_numpy(lengths)
        return Batch(
            (batch.inputs[0].masked_fill(padding, self._tokens.padding),),
            batch.targets.masked_fill(padding, IGNORED),
            # As the layers take it, for every engine alike: (batch, heads, positions that see, positions that are seen).
            {"attention_mask": ~padding[:, None, None]},
        )

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def make_workload(name: str, settings: TrainingSettings) -> Workload:
    """The workload or scenario of that name."""
    return CATALOG[name](settings.scale, settings.seed, settings.text)
