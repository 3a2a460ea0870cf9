"""Workloads: models as plain chains of blocks, with batches and a loss.

The sizes of the first four are such that a step takes some tenths of a second on two CPU cores, so that the time of a Python call
does not show. Two are for communication, many small gradients or few large ones on inputs so small that communication is a large
part of a step. The last one learns a text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.app.compare.runner.engine import Workload
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.models.lstm import lstm_language_model
from hvd_ckpt.data.objectives import IGNORED
from hvd_ckpt.parallel.pipeline.chain import Chain
from hvd_ckpt.utils.named import import_named

CLASSES = 10
STRIDE = 7919  # windows of a text from one sample to the next; prime, so that all have their turn
HELD_OUT = 512  # windows of a text, the last ones


@dataclass(frozen=True)
class RandomBatch(Workload):
    """A model and one random batch; the fields of the classes are their sizes.

    Attributes:
        name: in options and tables.
        changes: each step has another batch.
        batch: samples in the batch.
    """

    name: ClassVar[str]
    changes: ClassVar[bool] = False

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

    batch: int = 2
    length: int = 256
    width: int = 256
    heads: int = 8
    layers: int = 12
    vocabulary: int = 256

    def chain(self, tied: bool = True) -> Chain:
        """The model as this library's chain of blocks, whose head may share the weights of the embedding."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("batch", "text")}
        return gpt(**sizes, tied=tied)

    def model(self) -> nn.Sequential:
        # A plain chain, which every library takes.
        return nn.Sequential(OrderedDict(self.chain(tied=False).named_children()))


@dataclass(frozen=True)
class Bert(RandomBatch):
    """Hugging Face's BERT with its masked-language-model head and dropout 0.1."""

    name: ClassVar[str] = "bert"

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


@dataclass(frozen=True)
class Text(Gpt):
    """A GPT on the bytes of a text, a file or by default the source text of Python's library."""

    name: ClassVar[str] = "text"
    changes: ClassVar[bool] = True

    text: str = ""

    @property
    def tokens(self) -> Any:
        return _tokens(self.text)

    def windows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows of the text."""
        starts = [number * self.length for number in numbers]
        cut = [self.tokens[start : start + self.length + 1].astype("int64") for start in starts]
        tokens = torch.stack([torch.from_numpy(window) for window in cut])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def draw(self, number: int, seed: int) -> tuple[Tensor, Tensor]:
        trained = (len(self.tokens) - 1) // self.length - HELD_OUT
        first = number * self.batch
        return self.windows([(seed + each) * STRIDE % trained for each in range(first, first + self.batch)])

    def held_out(self) -> tuple[Tensor, Tensor]:
        every = (len(self.tokens) - 1) // self.length
        return self.windows(range(every - HELD_OUT, every))


@cache
def _tokens(text: str) -> Any:
    from hvd_ckpt.app.datasets.tokens import Tokens

    return Tokens(text or None).array


WORKLOADS: dict[str, type[RandomBatch]] = {
    kind.name: kind for kind in (Gpt, Bert, DenseNet, ResNet, Lstm, ManyGradients, Transformer, Text)
}


def workload(name: str, sizes: Mapping[str, Any] | None = None) -> RandomBatch:
    """The workload of that name, one of :data:`WORKLOADS` or ``module:Class``, in these sizes or its own.

    Raises:
        ValueError: no workload has this name.
    """
    if name not in WORKLOADS and ":" not in name:
        raise ValueError(f"'{name}' is not one of {', '.join(WORKLOADS)}")
    kind = WORKLOADS[name] if name in WORKLOADS else import_named("workload", name)
    return kind(**(sizes or {}))
