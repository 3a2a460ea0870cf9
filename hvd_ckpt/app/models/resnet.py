"""ResNets as flat chains, one block per residual unit.

There are three families, which differ in depth:

- for small images (He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, section 4.2): units of two
  convolutions in three stages, 6n + 2 layers, shortcuts without parameters;
- for small images and up to 1001 layers (the same authors, "Identity Mappings in Deep Residual Networks", 2016): bottleneck
  units that normalize and activate before they convolve, 9n + 2 layers;
- for ImageNet (2015, table 1): 18 to 152 layers in four stages.

The residual connection is inside the block, so one tensor flows through the chain, and the chain can be cut before any unit. The
memory grows with the depth, and any of a thousand equal units can be recomputed.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hvd_ckpt.app.models.catalog import RESNETS, ResNetShape
from hvd_ckpt.app.models.options import Size, validated

EXPANSION = 4  # output maps of a bottleneck unit for each map of its 3x3 convolution


class PaddedShortcut(nn.Module):
    """Shortcut that takes every other pixel and adds maps of zeros (2015, section 4.2: "option A")."""

    def __init__(self, maps: int, made: int) -> None:
        super().__init__()
        self.added = made - maps

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return functional.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))

    def extra_repr(self) -> str:
        return f"added={self.added}"


class Unit(nn.Module):
    """Convolutions and a shortcut, with an activation after the addition (2015, figures 2 and 5).

    From (batch, maps, height, width) to (batch, made, height / stride, width / stride), rounded up.
    """

    def __init__(self, convolutions: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.convolutions = convolutions
        self.shortcut = shortcut

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.convolutions(features) + self.shortcut(features), inplace=True)


class PreactivatedUnit(nn.Module):
    """Norm and activation, then a bottleneck and an identity shortcut (2016, figure 4e); shapes as in :class:`Unit`.

    A unit that changes the shape has the activation in front of both paths (2016, appendix), since its shortcut projects.
    """

    def __init__(self, maps: int, inner: int, stride: int) -> None:
        super().__init__()
        made = EXPANSION * inner
        self.activation = nn.Sequential(nn.BatchNorm2d(maps), nn.ReLU(inplace=True))
        layers = _convolutions((maps, inner, 1, stride), (inner, inner, 3, 1), (inner, made, 1, 1))
        self.convolutions = nn.Sequential(*layers[:-2])
        self.projection = nn.Conv2d(maps, made, 1, stride, bias=False) if made != maps else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        activated = self.activation(features)
        shortcut = features if self.projection is None else self.projection(activated)
        return self.convolutions(activated) + shortcut


class ResNet(nn.Sequential):
    """A ResNet whose children are its blocks: stem, residual units, classifier.

    The input is (batch, channels, height, width), the output (batch, classes) of scores before the softmax. Any resolution works.
    The papers use 224 pixels for ImageNet networks (64 pixels give 2x2 in the last stage) and 32 for the others.
    """

    def __init__(self, shape: ResNetShape, channels: int, classes: int) -> None:
        expansion = 1 if shape.unit == "basic" else EXPANSION
        build = PreactivatedUnit if shape.unit == "preactivated" else partial(_unit, shape)
        chain: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(shape, channels))
        maps = shape.maps
        for stage, units in enumerate(shape.units):
            inner = shape.maps << stage
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                chain[f"stage{stage + 1}_unit{unit + 1}"] = build(maps, inner, stride)
                maps = expansion * inner
        activation = [nn.BatchNorm2d(maps), nn.ReLU(inplace=True)] if shape.unit == "preactivated" else []
        chain["classifier"] = nn.Sequential(
            *activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, classes)
        )
        super().__init__(chain)
        self.apply(initialize)


@validated
def resnet(depth: int, *, channels: Size = 3, classes: Size = 10) -> ResNet:
    """A randomly initialized ResNet; ``depth`` is a key of :data:`RESNETS`.

    Raises:
        ValueError: the depth is unknown.
    """
    if depth not in RESNETS:
        raise ValueError(f"no ResNet of depth {depth}: choose one of {', '.join(map(str, sorted(RESNETS)))}")
    return ResNet(RESNETS[depth], channels, classes)


def _convolutions(*sizes: tuple[int, int, int, int]) -> list[nn.Module]:
    """Convolutions of (maps in, maps out, kernel, stride), each followed by a norm and an activation."""
    layers: list[nn.Module] = []
    for maps, made, kernel, stride in sizes:
        layers.append(nn.Conv2d(maps, made, kernel, stride, padding=kernel // 2, bias=False))
        layers += [nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
    return layers


def _unit(shape: ResNetShape, maps: int, inner: int, stride: int) -> Unit:
    """A basic or bottleneck unit.

    In a bottleneck, the 3x3 convolution halves the resolution. In 2015, the first 1x1 convolution did, which ignores three of four
    pixels.
    """
    if shape.unit == "basic":
        made = inner
        layers = _convolutions((maps, inner, 3, stride), (inner, inner, 3, 1))
    else:
        made = EXPANSION * inner
        layers = _convolutions((maps, inner, 1, 1), (inner, inner, 3, stride), (inner, made, 1, 1))
    if maps == made:
        shortcut: nn.Module = nn.Identity()
    elif shape.unit == "basic" and not shape.large_images:
        shortcut = PaddedShortcut(maps, made)
    else:
        shortcut = nn.Sequential(nn.Conv2d(maps, made, 1, stride, bias=False), nn.BatchNorm2d(made))
    return Unit(nn.Sequential(*layers[:-1]), shortcut)


def imagenet_stem(channels: int, maps: int) -> nn.Module:
    """A 7x7 convolution and pooling, to a quarter of the resolution."""
    return nn.Sequential(
        nn.Conv2d(channels, maps, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(maps),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _stem(shape: ResNetShape, channels: int) -> nn.Module:
    if shape.large_images:
        return imagenet_stem(channels, shape.maps)
    convolution = nn.Conv2d(channels, shape.maps, kernel_size=3, padding=1, bias=False)
    if shape.unit == "preactivated":  # the first unit normalizes and activates
        return convolution
    return nn.Sequential(convolution, nn.BatchNorm2d(shape.maps), nn.ReLU(inplace=True))


def initialize(module: nn.Module) -> None:
    """Initializes convolutions by He et al. ("Delving Deep into Rectifiers", 2015), as in the papers."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
