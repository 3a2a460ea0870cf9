"""What is trained while the clock runs: models whose gradients are many and small, or few and large.

Inputs are random and small, so that communication is a large part of a step, and nothing is recomputed. The optimizer is
plain SGD, the one whose own work hides least of the reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

__all__ = ["WORKLOADS", "Workload"]

CLASSES = 10


class Workload(ABC):
    """A model, its batch and its loss.

    Attributes:
        title: one line for reports.
        warm_up: steps before the clock runs.
        steps: timed steps of one job, unless told otherwise.
    """

    title: ClassVar[str]
    warm_up: ClassVar[int]
    steps: ClassVar[int]

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model in training mode, initialized from torch's global random state."""

    @abstractmethod
    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        """One rank's batch, the same in every step."""

    def loss(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """A loss that uses every parameter of the model."""
        target = torch.arange(len(inputs)) % CLASSES
        return functional.cross_entropy(model(inputs), target)


class ManySmall(Workload):
    """DenseNet-BC with 60 dense layers of growth 12 on 8 x 8 images: 371 gradients, 4.2 MiB in all."""

    title = "DenseNet, 371 gradients of 4.2 MiB in all"
    warm_up = 5
    steps = 30

    def model(self) -> nn.Module:
        from hvd_ckpt.models.densenet import DenseNet
        from hvd_ckpt.models.sizes import DenseNetShape

        shape = DenseNetShape(growth=12, blocks=(20, 20, 20), initial=24, large_images=False)
        return DenseNet(shape, channels=1, classes=CLASSES).train()

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 1, 8, 8, generator=generator)


class TransformerClassifier(nn.Module):
    """Encoder layers and a classifier of the mean: (batch, length, width) in, (batch, classes) out."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        scores: torch.Tensor = self.classifier(hidden.mean(dim=1))
        return scores


class FewLarge(Workload):
    """A transformer encoder of 8 layers of width 512 on sequences of 16: 96 MiB of gradients, nearly all in 32 matrices."""

    title = "Transformer, 98 gradients of 96 MiB in all"
    warm_up = 3
    steps = 6

    def model(self) -> nn.Module:
        return TransformerClassifier(width=512, heads=8, layers=8).train()

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 16, 512, generator=generator)


WORKLOADS: dict[str, type[Workload]] = {"densenet": ManySmall, "transformer": FewLarge}
