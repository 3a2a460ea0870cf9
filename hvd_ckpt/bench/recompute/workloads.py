"""What a step consists of: four models, each a plain chain of blocks, with a batch and a loss.

Sizes are such that on two CPU cores a step takes some tenths of a second, so that what a call of a
Python function costs does not show; on a GPU the models are the well-known ones of their kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.models.gpt import gpt
from hvd_ckpt.models.lstm import lstm_language_model

__all__ = ["NAMES", "SIZES", "Bert", "DenseNet", "Gpt", "Lstm", "Workload", "workload"]

CLASSES = 10
IGNORED = -100  # the label of a token that is not predicted


@dataclass(frozen=True)
class Workload(ABC):
    """A model, its batch and its loss; the fields of the classes are their sizes.

    Attributes:
        name: in options and tables.
        wanted: the most that a step of this library's plan may take, as a ratio to that of a peer that needs as much memory.
        attention: whether there is any.
        saved_regions: where a user of torch_remat would have activations saved: for each variant, how the names of the
            submodules within a block end.
        batch: samples in the batch.
    """

    name: ClassVar[str]
    wanted: ClassVar[float] = 1.0
    saved_regions: ClassVar[dict[str, tuple[str, ...]]]
    attention: ClassVar[bool] = False

    batch: int

    @abstractmethod
    def model(self) -> nn.Sequential:
        """A fresh model in training mode, initialized from torch's global random state."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the model, and the targets of the loss."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy over the last dimension of scores (tokens) or the second of two (images)."""
        return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)

    @property
    def title(self) -> str:
        """One line for reports: the sizes."""
        values = ", ".join(f"{name} {value}" for name, value in vars(self).items())
        return f"{type(self).__doc__ or self.name}".split("\n")[0].rstrip(".") + f": {values}"


@dataclass(frozen=True)
class Gpt(Workload):
    """A pre-norm GPT with causal attention, on bytes."""

    name: ClassVar[str] = "gpt"
    attention: ClassVar[bool] = True
    wanted: ClassVar[float] = 0.95
    saved_regions: ClassVar[dict[str, tuple[str, ...]]] = {
        "scaled dot products saved": ("attention.attend",),
        "attention saved": ("attention",),
        "perceptron saved": ("perceptron",),
    }

    batch: int = 2
    length: int = 256
    width: int = 256
    heads: int = 8
    layers: int = 12
    vocabulary: int = 256

    def model(self) -> nn.Sequential:
        model = gpt(
            vocabulary=self.vocabulary,
            length=self.length,
            width=self.width,
            heads=self.heads,
            layers=self.layers,
            tied=False,
        )
        return nn.Sequential(OrderedDict(model.named_children()))  # a plain chain, as every peer takes it

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Bert(Workload):
    """Hugging Face's BERT with its masked-language-model head and dropout 0.1."""

    name: ClassVar[str] = "bert"
    attention: ClassVar[bool] = True
    wanted: ClassVar[float] = 0.95
    saved_regions: ClassVar[dict[str, tuple[str, ...]]] = {
        "scaled dot products and projections saved": ("layer.attention.self",),
        "attention saved": ("layer.attention",),
    }

    batch: int = 2
    length: int = 128
    width: int = 256
    heads: int = 8
    layers: int = 12
    vocabulary: int = 2000

    def model(self) -> nn.Sequential:
        from hvd_ckpt.models.bert import bert

        model = bert(
            vocabulary=self.vocabulary,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            length=self.length,
        )
        # A plain chain, as every peer takes it: no token is padding, so nothing has to be handed to all blocks.
        return nn.Sequential(OrderedDict(model.named_children()))

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(1, self.vocabulary, (self.batch, self.length), generator=generator)
        predicted = torch.rand(tokens.shape, generator=generator) < 0.15  # as Devlin et al. (2018) do
        return tokens, tokens.where(predicted, torch.tensor(IGNORED))


@dataclass(frozen=True)
class DenseNet(Workload):
    """DenseNet, batch norm in every layer."""

    name: ClassVar[str] = "densenet"
    saved_regions: ClassVar[dict[str, tuple[str, ...]]] = {
        "1x1 convolutions saved": ("2",),  # as Pleiss et al. (2017) do
        "convolutions saved": ("2", "5"),
    }

    batch: int = 4
    depth: int = 100
    pixels: int = 32

    def model(self) -> nn.Sequential:
        from hvd_ckpt.models.densenet import densenet

        return densenet(self.depth, classes=CLASSES).train()

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)
        return images, torch.arange(self.batch) % CLASSES


@dataclass(frozen=True)
class Lstm(Workload):
    """A word-level LSTM language model with dropout 0.2."""

    name: ClassVar[str] = "lstm"
    saved_regions: ClassVar[dict[str, tuple[str, ...]]] = {"LSTM saved": ("recurrence",)}

    batch: int = 4
    length: int = 64
    width: int = 512
    layers: int = 6
    vocabulary: int = 2000

    def model(self) -> nn.Sequential:
        return lstm_language_model(
            vocabulary=self.vocabulary, width=self.width, layers=self.layers, dropout=0.2
        ).train()

    def sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CLASSES_BY_NAME: dict[str, type[Workload]] = {kind.name: kind for kind in (Gpt, Bert, DenseNet, Lstm)}
NAMES = tuple(CLASSES_BY_NAME)

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {name: {} for name in NAMES},
    "cuda": {  # GPT-2 small with long sequences, BERT-large, DenseNet-264
        "gpt": {"batch": 8, "length": 2048, "width": 768, "heads": 12, "vocabulary": 50257},
        "bert": {
            "batch": 32,
            "length": 512,
            "width": 1024,
            "heads": 16,
            "layers": 24,
            "vocabulary": 30522,
        },
        "densenet": {"batch": 64, "depth": 264, "pixels": 224},
        "lstm": {"batch": 128, "length": 256, "width": 1536},
    },
    "quick": {
        "gpt": {"batch": 2, "length": 32, "width": 32, "heads": 2, "layers": 4},
        "bert": {"batch": 2, "length": 16, "width": 32, "heads": 2, "layers": 4, "vocabulary": 100},
        "densenet": {"batch": 2, "depth": 22, "pixels": 8},
        "lstm": {"batch": 2, "length": 8, "width": 16, "layers": 3, "vocabulary": 50},
    },
}
"""What differs from the default sizes: nothing on the CPU, the well-known models on a GPU, next to nothing for a quick look."""


def workload(name: str, sizes: str = "cpu") -> Workload:
    """The workload of that name (one of :data:`NAMES`) in one of the :data:`SIZES`."""
    return CLASSES_BY_NAME[name](**SIZES[sizes][name])
