"""Workloads: models as plain chains of blocks, with batches and a loss.

The sizes of the first ones are such that a step takes some tenths of a second on two CPU cores, so that the time of a Python call
does not show. Two are for communication, many small gradients or few large ones on inputs so small that communication is a large
part of a step. The last one learns a text.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.app.datasets.text import CausalText
from hvd_ckpt.app.datasets.tokens import Tokens
from hvd_ckpt.app.models.catalog import DenseNetShape
from hvd_ckpt.app.models.densenet import DenseNet
from hvd_ckpt.data.objectives import IGNORED
from hvd_ckpt.utils.named import import_named

CLASSES = 10
STRIDE = 7919  # windows of a text from one sample to the next; prime, so that all have their turn
HELD_OUT = 512  # windows of a text, the last ones

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RandomBatch:
    """A model and one random batch.

    Attributes:
        build: ``module:function`` that makes a fresh model, initialized from torch's global random state, from those of the sizes
            that it takes.
        sample: takes a generator and the sizes; inputs of the model, and the targets of the loss.
        sizes: by name, among them ``batch``, the samples in a batch.
        changes: each step has another batch.
    """

    build: str
    sample: Callable[..., Sample]
    sizes: Mapping[str, Any]
    changes: bool = False

    def model(self) -> nn.Sequential:
        """A fresh model in training mode: a plain chain, which every library takes, unless this library's recomputes its blocks."""
        build = import_named("function", self.build)
        taken = self.sizes.keys() & inspect.signature(build).parameters.keys()
        model: Any = build(**{name: self.sizes[name] for name in taken})
        if not self.sizes.get("checkpoint_interval"):
            model = nn.Sequential(OrderedDict(model.named_children()))
        return model.train()  # type: ignore[no-any-return]

    def draw(self, number: int, seed: int) -> Sample:
        """A micro-batch by its number over all ranks and steps."""
        return self.sample(torch.Generator().manual_seed(seed + number), **self.sizes)

    def held_out(self) -> Sample | None:
        """Samples that are not trained on, if there are such."""
        return None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy over the last dimension of scores (tokens) or the second of two (images); it uses every parameter."""
        return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


class Text(RandomBatch):
    """Windows of a text, a file or by default the source text of Python's library; the last ones are held out."""

    def draw(self, number: int, seed: int) -> Sample:
        first, batch = number * self.sizes["batch"], self.sizes["batch"]
        trained = len(self._windows()) - HELD_OUT
        return self._take([(seed + each) * STRIDE % trained for each in range(first, first + batch)])

    def held_out(self) -> Sample:
        return self._take(range(len(self._windows()))[-HELD_OUT:])

    def _windows(self) -> CausalText:
        return _windows(self.sizes["text"], self.sizes["length"])

    def _take(self, numbers: Sequence[int]) -> Sample:
        batch = self._windows().batch(numbers, [0] * len(numbers))
        return batch.inputs[0], batch.targets


@cache
def _windows(text: str, length: int) -> CausalText:
    windows = CausalText(Tokens(text or None), length)
    if len(windows) <= HELD_OUT:
        raise ValueError(
            f"the text has {len(windows)} windows of {length} tokens, and {HELD_OUT} are held out: give more text"
        )
    return windows


def _continued(generator: torch.Generator, batch: int, length: int, vocabulary: int, **_: Any) -> Sample:
    """Tokens (batch, length), and the next ones."""
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _masked(generator: torch.Generator, batch: int, length: int, vocabulary: int, **_: Any) -> Sample:
    tokens = torch.randint(1, vocabulary, (batch, length), generator=generator)
    predicted = torch.rand(tokens.shape, generator=generator) < 0.15  # as Devlin et al. (2018) do
    return tokens, tokens.where(predicted, torch.tensor(IGNORED))


def _images(generator: torch.Generator, batch: int, pixels: int, channels: int, **_: Any) -> Sample:
    """Noise (batch, channels, pixels, pixels), and the classes in turn."""
    return torch.randn(batch, channels, pixels, pixels, generator=generator), torch.arange(batch) % CLASSES


def _sequences(generator: torch.Generator, batch: int, length: int, width: int, **_: Any) -> Sample:
    return torch.randn(batch, length, width, generator=generator), torch.arange(batch) % CLASSES


def _vectors(generator: torch.Generator, batch: int, width: int, **_: Any) -> Sample:
    return torch.randn(batch, width, generator=generator), torch.arange(batch) % CLASSES


def linear(width: int, layers: int) -> nn.Sequential:
    """Linear layers between two blocks without parameters, so that all of these are inner blocks."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(nn.Identity(), *blocks, nn.Identity())


def narrow(layers: int, channels: int) -> nn.Module:
    """DenseNet-BC of three blocks of narrow layers."""
    shape = DenseNetShape(growth=12, blocks=(layers,) * 3, initial=24, large_images=False)
    return DenseNet(shape, channels=channels, classes=CLASSES)


def encoder(width: int, heads: int, layers: int) -> nn.Sequential:
    """A transformer encoder, and a classifier of the mean over a sequence."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)]
    return nn.Sequential(*blocks, _MeanClassifier(width))


class _MeanClassifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.classifier(hidden.mean(dim=1))
        return scores


_TRANSFORMER = {"batch": 2, "length": 256, "width": 256, "heads": 8, "layers": 12, "vocabulary": 256}
_GPT = {**_TRANSFORMER, "tied": False}
_BERT = {**_TRANSFORMER, "length": 128, "vocabulary": 2000}
_LSTM = {"batch": 4, "length": 64, "width": 512, "layers": 6, "vocabulary": 2000, "dropout": 0.2}
_ENCODER = {"batch": 4, "length": 16, "width": 512, "heads": 8, "layers": 8}
_IMAGES = {"pixels": 32, "channels": 3, "classes": CLASSES}
_NARROW = {"batch": 4, "layers": 20, "pixels": 8, "channels": 1}
_MODELS = "hvd_ckpt.app.models"
WORKLOADS: dict[str, RandomBatch] = {
    "gpt": RandomBatch(f"{_MODELS}.gpt:gpt", _continued, _GPT),
    "gpt-recomputed": RandomBatch(
        f"{_MODELS}.gpt:gpt", _continued, {**_TRANSFORMER, "checkpoint_interval": 1}
    ),
    "bert": RandomBatch(f"{_MODELS}.transformer:bert", _masked, _BERT),
    "densenet": RandomBatch(f"{_MODELS}.densenet:densenet", _images, {"batch": 4, "depth": 100, **_IMAGES}),
    "resnet": RandomBatch(f"{_MODELS}.resnet:resnet", _images, {"batch": 32, "depth": 56, **_IMAGES}),
    "lstm": RandomBatch(f"{_MODELS}.lstm:lstm_language_model", _continued, _LSTM),
    "densenet-narrow": RandomBatch(f"{__name__}:narrow", _images, _NARROW),
    "transformer": RandomBatch(f"{__name__}:encoder", _sequences, _ENCODER),
    "linear": RandomBatch(f"{__name__}:linear", _vectors, {"batch": 256, "width": 2048, "layers": 16}),
    "text": Text(f"{_MODELS}.gpt:gpt", _continued, {**_GPT, "dropout": 0.0, "text": ""}, changes=True),
}


def workload(name: str, sizes: Mapping[str, Any] | None = None) -> RandomBatch:
    """The workload of that name, in these sizes where they are given."""
    found = WORKLOADS[name]
    return replace(found, sizes={**found.sizes, **(sizes or {})})
