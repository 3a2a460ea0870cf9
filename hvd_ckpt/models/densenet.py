"""DenseNet as a flat chain, one block per dense layer.

DenseNet (Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", 2017) is the classic case for
recomputation: every layer's input is the concatenation of all features before it, so what is kept for the backward
pass grows with the square of a block's depth (Pleiss et al., "Memory-Efficient Implementation of DenseNets", 2017),
and each of its batch norms is a trap for running statistics.

A dense layer here returns its input and its own new features concatenated, so one tensor flows through the whole chain
and the model can be cut before any layer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["DEPTHS", "DenseNet", "DenseNetShape", "densenet"]

BOTTLENECK = 4  # a bottleneck makes 4 * growth feature maps (section 3 of the paper, "Bottleneck layers")


@dataclass(frozen=True)
class DenseNetShape:
    """The numbers that tell one DenseNet from another.

    Attributes:
        growth: feature maps that each dense layer adds (the paper's k).
        blocks: dense layers in each dense block; a transition halves maps and resolution between two blocks.
        initial: feature maps made by the stem.
        large_images: the ImageNet stem (7x7 convolution and pooling, a quarter of the resolution is left) or
            the CIFAR one (3x3 convolution at full resolution).
    """

    growth: int
    blocks: tuple[int, ...]
    initial: int
    large_images: bool


DEPTHS: dict[int, DenseNetShape] = {
    22: DenseNetShape(12, (3, 3, 3), 24, large_images=False),
    100: DenseNetShape(12, (16, 16, 16), 24, large_images=False),
    121: DenseNetShape(32, (6, 12, 24, 16), 64, large_images=True),
    161: DenseNetShape(48, (6, 12, 36, 24), 96, large_images=True),
    169: DenseNetShape(32, (6, 12, 32, 32), 64, large_images=True),
    201: DenseNetShape(32, (6, 12, 48, 32), 64, large_images=True),
    264: DenseNetShape(32, (6, 12, 64, 48), 64, large_images=True),
}
"""The paper's networks by depth (100 is DenseNet-BC with k=12), and 22: DenseNet-BC small enough for a CPU.

Depth counts convolutions and the classifier; the paper's 264 has 265 of them by its own table."""


class DenseLayer(nn.Sequential):
    """A bottleneck layer: (batch, maps, height, width) in, (batch, maps + growth, height, width) out."""

    def __init__(self, maps: int, growth: int, dropout: float) -> None:
        wide = BOTTLENECK * growth
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.Conv2d(maps, wide, kernel_size=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, growth, kernel_size=3, padding=1, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = super().forward(features)  # type: ignore[no-untyped-call]
        return torch.cat([features, added], dim=1)


class Transition(nn.Sequential):
    """Half the feature maps at half the resolution."""

    def __init__(self, maps: int) -> None:
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.Conv2d(maps, maps // 2, kernel_size=1, bias=False),
            nn.AvgPool2d(kernel_size=2, stride=2),
        )


class DenseNet(nn.Sequential):
    """A DenseNet whose children are its blocks: stem, dense layers, transitions, classifier.

    Input (batch, channels, height, width), output (batch, classes) of scores before the softmax. Height and width
    must survive the halvings: at least 32 with the ImageNet stem and 4 with the CIFAR stem and three blocks.

    Raises:
        ValueError: for ``dropout`` outside [0, 1), channels or classes below 1.
    """

    def __init__(self, shape: DenseNetShape, channels: int, classes: int, dropout: float = 0.0) -> None:
        if channels < 1 or classes < 1:
            raise ValueError(f"channels and classes must be at least 1, got {channels} and {classes}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        chain: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(shape, channels))
        maps = shape.initial
        for block, layers in enumerate(shape.blocks, start=1):
            if block > 1:
                chain[f"transition{block - 1}"] = Transition(maps)
                maps //= 2
            for layer in range(1, layers + 1):
                chain[f"block{block}_layer{layer}"] = DenseLayer(maps, shape.growth, dropout)
                maps += shape.growth
        chain["classifier"] = nn.Sequential(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(maps, classes),
        )
        super().__init__(chain)
        self.apply(_initialize)


def densenet(depth: int, *, channels: int = 3, classes: int = 1000, dropout: float = 0.0) -> DenseNet:
    """The DenseNet of a given depth, randomly initialized; the depths are the keys of :data:`DEPTHS`.

    Raises:
        ValueError: for a depth that is not among them.
    """
    if depth not in DEPTHS:
        raise ValueError(f"no DenseNet of depth {depth}: choose one of {', '.join(map(str, sorted(DEPTHS)))}")
    return DenseNet(DEPTHS[depth], channels, classes, dropout)


def _stem(shape: DenseNetShape, channels: int) -> nn.Module:
    if not shape.large_images:
        return nn.Conv2d(channels, shape.initial, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(
        nn.Conv2d(channels, shape.initial, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(shape.initial),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _initialize(module: nn.Module) -> None:
    """He et al. (2015) for convolutions, as the paper does."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
