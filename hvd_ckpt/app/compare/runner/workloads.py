"""Workloads: models as plain chains of blocks, with a random batch and a loss; and the base of all workloads.

The sizes of the first four are such that a step takes some tenths of a second on two CPU cores, so that the time of a Python call
does not show; on a GPU they are well-known models of their kind. The others are for communication: many small gradients or few
large ones on inputs so small that communication is a large part of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.models.lstm import lstm_language_model
from hvd_ckpt.data.objectives import IGNORED
from hvd_ckpt.pipeline.chain import Chain
from hvd_ckpt.utils.named import import_named

CLASSES = 10


class Workload(ABC):
    """A model that is trained, and its loss.

    Attributes:
        static: the same graph in every step, so that each gradient takes part in exactly one reduction.
        scales_loss: the loss is scaled, and a step skipped on overflow, in any precision.
        uneven: ranks have unequal numbers of steps.
        alike: all ranks use the same layers in the same order.
        half: some parameters have half precision.
    """

    static: ClassVar[bool] = True
    scales_loss: ClassVar[bool] = False
    uneven: ClassVar[bool] = False
    alike: ClassVar[bool] = True
    half: ClassVar[bool] = False

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""


@dataclass(frozen=True)
class RandomBatch(Workload):
    """A model and one random batch; the fields of the classes are their sizes.

    Attributes:
        name: in options and tables.
        attention: whether the model has attention layers.
        changes: each step has another batch.
        saved_regions: selective recomputation: for each variant, how the names of those submodules within a block end whose
            activations are saved.
        batch: samples in the batch.
    """

    name: ClassVar[str]
    attention: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    saved_regions: ClassVar[dict[str, tuple[str, ...]]] = {}

    batch: int

    @abstractmethod
    def model(self) -> nn.Sequential:
        """A fresh model in training mode, initialized from torch's global random state."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs of the model, and the targets of the loss."""

    def draw(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        """A micro-batch by its number over all ranks and steps."""
        return self.sample(torch.Generator().manual_seed(seed + number))

    def held_out(self) -> tuple[Tensor, Tensor] | None:
        """Samples that are not trained on, if there are such."""
        return None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy over the last dimension of scores (tokens) or the second of two (images); it uses every parameter."""
        return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)

    @property
    def title(self) -> str:
        """One line for reports: the sizes."""
        values = ", ".join(f"{name} {value}" for name, value in vars(self).items())
        return f"{type(self).__doc__ or self.name}".split("\n")[0].rstrip(".") + f": {values}"


class _OnTokens(RandomBatch):
    """Random tokens (batch, length), of which the model predicts the next ones."""

    length: int
    vocabulary: int

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class _OnImages(RandomBatch):
    """Noise (batch, channels, pixels, pixels), and the classes in turn."""

    channels: ClassVar[int] = 3

    pixels: int

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (self.batch, self.channels, self.pixels, self.pixels)
        return torch.randn(shape, generator=generator), torch.arange(self.batch) % CLASSES


@dataclass(frozen=True)
class Gpt(_OnTokens):
    """A pre-norm GPT with causal attention, on bytes."""

    name: ClassVar[str] = "gpt"
    attention: ClassVar[bool] = True
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

    def chain(self, tied: bool = True) -> Chain:
        """The model as this library's chain of blocks, whose head may share the weights of the embedding."""
        sizes = {name: value for name, value in vars(self).items() if name != "batch"}
        return gpt(**sizes, tied=tied)

    def model(self) -> nn.Sequential:
        # A plain chain, which every library takes.
        return nn.Sequential(OrderedDict(self.chain(tied=False).named_children()))


@dataclass(frozen=True)
class Bert(RandomBatch):
    """Hugging Face's BERT with its masked-language-model head and dropout 0.1."""

    name: ClassVar[str] = "bert"
    attention: ClassVar[bool] = True
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
        from hvd_ckpt.app.models.bert import bert

        model = bert(
            vocabulary=self.vocabulary,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            length=self.length,
        )
        # A plain chain, which every library takes: no token is padding, so no mask has to be handed to all blocks.
        return nn.Sequential(OrderedDict(model.named_children()))

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(1, self.vocabulary, (self.batch, self.length), generator=generator)
        predicted = torch.rand(tokens.shape, generator=generator) < 0.15  # as Devlin et al. (2018) do
        return tokens, tokens.where(predicted, torch.tensor(IGNORED))


@dataclass(frozen=True)
class DenseNet(_OnImages):
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
        from hvd_ckpt.app.models.densenet import densenet

        return densenet(self.depth, classes=CLASSES).train()


@dataclass(frozen=True)
class ResNet(_OnImages):
    """A ResNet for small images, batch norm in every unit."""

    name: ClassVar[str] = "resnet"

    batch: int = 32
    depth: int = 56
    pixels: int = 32

    def model(self) -> nn.Sequential:
        from hvd_ckpt.app.models.resnet import resnet

        return nn.Sequential(OrderedDict(resnet(self.depth, classes=CLASSES).named_children())).train()


@dataclass(frozen=True)
class Lstm(_OnTokens):
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


@dataclass(frozen=True)
class ManyGradients(_OnImages):
    """DenseNet-BC of three blocks of narrow layers on small grey images: many small gradients."""

    name: ClassVar[str] = "densenet-narrow"
    channels: ClassVar[int] = 1

    batch: int = 4
    layers: int = 20
    pixels: int = 8

    def model(self) -> nn.Sequential:
        from hvd_ckpt.app.models.catalog import DenseNetShape
        from hvd_ckpt.app.models.densenet import DenseNet

        shape = DenseNetShape(growth=12, blocks=(self.layers,) * 3, initial=24, large_images=False)
        return DenseNet(shape, channels=self.channels, classes=CLASSES).train()


class _MeanClassifier(nn.Module):
    """Scores (batch, classes) of the mean over a sequence (batch, length, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.classifier(hidden.mean(dim=1))
        return scores


@dataclass(frozen=True)
class Transformer(RandomBatch):
    """A transformer encoder and a classifier on short random sequences: few large gradients."""

    name: ClassVar[str] = "transformer"
    attention: ClassVar[bool] = True

    batch: int = 4
    length: int = 16
    width: int = 512
    heads: int = 8
    layers: int = 8

    def model(self) -> nn.Sequential:
        layers = [
            nn.TransformerEncoderLayer(
                self.width, self.heads, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(self.layers)
        ]
        return nn.Sequential(*layers, _MeanClassifier(self.width)).train()

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(self.batch, self.length, self.width, generator=generator)
        return hidden, torch.arange(self.batch) % CLASSES


WORKLOADS: dict[str, type[RandomBatch]] = {
    kind.name: kind for kind in (Gpt, Bert, DenseNet, ResNet, Lstm, ManyGradients, Transformer)
}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {},
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
        "resnet": {"batch": 8, "depth": 20, "pixels": 8},
        "lstm": {"batch": 2, "length": 8, "width": 16, "layers": 3, "vocabulary": 50},
    },
}
"""Sizes that differ from the defaults: none on the CPU, well-known models on a GPU, tiny models for a quick check."""


def workload(name: str, sizes: str | dict[str, Any] = "cpu") -> RandomBatch:
    """The workload of that name (one of :data:`WORKLOADS`, or ``module:Class``) in one of the :data:`SIZES`, or in these.

    Raises:
        ValueError: no workload has this name.
    """
    if name not in WORKLOADS and ":" not in name:
        raise ValueError(f"'{name}' is not one of {', '.join(WORKLOADS)}")
    kind = WORKLOADS[name] if name in WORKLOADS else import_named("workload", name)
    return kind(**(SIZES[sizes].get(name, {}) if isinstance(sizes, str) else sizes))
