"""Workloads: models as plain chains of blocks, with batches and a loss.

The sizes of the first ones are such that a step takes some tenths of a second on two CPU cores, so that the time of a Python call
does not show. Two are for communication, many small gradients or few large ones on inputs so small that communication is a large
part of a step. The last one learns a text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.app.models.catalog import DenseNetShape
from hvd_ckpt.app.models.densenet import DenseNet, densenet
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.app.models.lstm import lstm_language_model
from hvd_ckpt.app.models.resnet import resnet
from hvd_ckpt.data.objectives import IGNORED

CLASSES = 10
STRIDE = 7919  # windows of a text from one sample to the next; prime, so that all have their turn
HELD_OUT = 512  # windows of a text, the last ones

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RandomBatch:
    """A model and one random batch.

    Attributes:
        build: takes the sizes and makes a fresh model, initialized from torch's global random state.
        sample: takes a generator and the sizes; inputs of the model, and the targets of the loss.
        sizes: by name, among them ``batch``, the samples in a batch.
        changes: each step has another batch.
    """

    build: Callable[..., nn.Module]
    sample: Callable[..., Sample]
    sizes: Mapping[str, Any]
    changes: bool = False

    def model(self) -> nn.Sequential:
        """A fresh model in training mode."""
        model: Any = self.build(**self.sizes)
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

    @property
    def _numbers(self) -> range:
        return range((len(_tokens(self.sizes["text"])) - 1) // self.sizes["length"])

    def _windows(self, numbers: range | list[int]) -> Sample:
        length, tokens = self.sizes["length"], _tokens(self.sizes["text"])
        cut = [tokens[number * length : (number + 1) * length + 1].astype("int64") for number in numbers]
        return _shifted(torch.stack([torch.from_numpy(window) for window in cut]))

    def draw(self, number: int, seed: int) -> Sample:
        first, batch = number * self.sizes["batch"], self.sizes["batch"]
        trained = len(self._numbers) - HELD_OUT
        return self._windows([(seed + each) * STRIDE % trained for each in range(first, first + batch)])

    def held_out(self) -> Sample:
        return self._windows(self._numbers[-HELD_OUT:])


@cache
def _tokens(text: str) -> Any:
    from hvd_ckpt.app.datasets.tokens import Tokens

    return Tokens(text or None).array


def _shifted(tokens: Tensor) -> Sample:
    """Tokens (batch, length), of which the model predicts the next ones."""
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _continued(generator: torch.Generator, batch: int, length: int, vocabulary: int, **_: Any) -> Sample:
    return _shifted(torch.randint(vocabulary, (batch, length + 1), generator=generator))


def _masked(generator: torch.Generator, batch: int, length: int, vocabulary: int, **_: Any) -> Sample:
    tokens = torch.randint(1, vocabulary, (batch, length), generator=generator)
    predicted = torch.rand(tokens.shape, generator=generator) < 0.15  # as Devlin et al. (2018) do
    return tokens, tokens.where(predicted, torch.tensor(IGNORED))


def _images(generator: torch.Generator, batch: int, pixels: int, channels: int = 3, **_: Any) -> Sample:
    """Noise (batch, channels, pixels, pixels), and the classes in turn."""
    return torch.randn(batch, channels, pixels, pixels, generator=generator), torch.arange(batch) % CLASSES


def _sequences(generator: torch.Generator, batch: int, length: int, width: int, **_: Any) -> Sample:
    return torch.randn(batch, length, width, generator=generator), torch.arange(batch) % CLASSES


def _plain(model: nn.Module) -> nn.Sequential:
    """A plain chain, which every library takes."""
    return nn.Sequential(OrderedDict(model.named_children()))


def _gpt(batch: int, text: str = "", interval: int = 0, **sizes: int) -> nn.Sequential:
    """A pre-norm GPT with causal attention; with an interval a chain of this library that recomputes so many blocks together."""
    chain = gpt(**sizes, tied=interval > 0, checkpoint_interval=interval)
    return chain if interval else _plain(chain)


def _bert(batch: int, **sizes: int) -> nn.Sequential:
    """BERT with its head. No token is padding, so no mask has to be handed to all blocks."""
    from hvd_ckpt.app.models.bert import bert  # which needs transformers

    return _plain(bert(**sizes))  # type: ignore[arg-type]


def _narrow(layers: int, channels: int, **_: Any) -> nn.Module:
    """DenseNet-BC of three blocks of narrow layers."""
    shape = DenseNetShape(growth=12, blocks=(layers,) * 3, initial=24, large_images=False)
    return DenseNet(shape, channels=channels, classes=CLASSES)


def _encoder(width: int, heads: int, layers: int, **_: Any) -> nn.Sequential:
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


def _lstm(vocabulary: int, width: int, layers: int, **_: Any) -> nn.Module:
    return lstm_language_model(vocabulary=vocabulary, width=width, layers=layers, dropout=0.2)


_GPT = {"batch": 2, "length": 256, "width": 256, "heads": 8, "layers": 12, "vocabulary": 256}
_BERT = {**_GPT, "length": 128, "vocabulary": 2000}
_LSTM = {"batch": 4, "length": 64, "width": 512, "layers": 6, "vocabulary": 2000}
_ENCODER = {"batch": 4, "length": 16, "width": 512, "heads": 8, "layers": 8}
WORKLOADS: dict[str, RandomBatch] = {
    "gpt": RandomBatch(_gpt, _continued, _GPT),
    "gpt-recomputed": RandomBatch(_gpt, _continued, {**_GPT, "interval": 1}),
    "bert": RandomBatch(_bert, _masked, _BERT),
    "densenet": RandomBatch(
        lambda depth, **_: densenet(depth, classes=CLASSES), _images, {"batch": 4, "depth": 100, "pixels": 32}
    ),
    "resnet": RandomBatch(
        lambda depth, **_: _plain(resnet(depth, classes=CLASSES)),
        _images,
        {"batch": 32, "depth": 56, "pixels": 32},
    ),
    "lstm": RandomBatch(_lstm, _continued, _LSTM),
    "densenet-narrow": RandomBatch(_narrow, _images, {"batch": 4, "layers": 20, "pixels": 8, "channels": 1}),
    "transformer": RandomBatch(_encoder, _sequences, _ENCODER),
    "text": Text(_gpt, _continued, {**_GPT, "text": ""}, changes=True),
}


def workload(name: str, sizes: Mapping[str, Any] | None = None) -> RandomBatch:
    """The workload of that name, in these sizes where they are given.

    Raises:
        ValueError: there is no workload of this name, or it has no such size.
    """
    if name not in WORKLOADS:
        raise ValueError(f"'{name}' is not one of {', '.join(WORKLOADS)}")
    found = WORKLOADS[name]
    if wrong := set(sizes or {}) - set(found.sizes):
        raise ValueError(f"{name} has no size {min(wrong)}: its sizes are {', '.join(found.sizes)}")
    return replace(found, sizes={**found.sizes, **(sizes or {})})
