"""DenseNet as a flat chain, one block per dense layer.

DenseNet (Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", 2017) is the classic case for
recomputation. The input of each layer is the concatenation of all features before it. So the memory of a block grows with the
square of its depth (Pleiss et al., "Memory-Efficient Implementation of DenseNets", 2017). Each batch norm has running statistics
that a recomputation must not update.

A dense layer here returns the concatenation of its input and its new features. So one tensor flows through the chain, and the model
can be cut before any layer.

The efficient variant of Pleiss et al. is an example of regions. Inside each layer, concatenation, norm and activation are a
checkpointed region, and the expensive convolution after them is not recomputed. The dense layers of a block pass on a tuple of all
features, each held once, in place of their concatenation. So nothing that grows with the square of the depth is kept. Weights,
their names and the bits of the results are the same.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from hvd_ckpt.app.models.catalog import DENSENETS, DenseNetShape
from hvd_ckpt.app.models.options import Probability, Size, validated
from hvd_ckpt.app.models.resnet import imagenet_stem, initialize
from hvd_ckpt.recompute import checkpoint
from hvd_ckpt.recompute.sequential import as_arguments

BOTTLENECK = 4  # a bottleneck has 4 * growth feature maps (section 3 of the paper, "Bottleneck layers")

Features = torch.Tensor | tuple[torch.Tensor, ...]


class DenseLayer(nn.Sequential):
    """Dense layer: a 1x1 convolution to ``BOTTLENECK * growth`` maps and a 3x3 convolution, each after norm and activation.

    From (batch, maps, height, width) to (batch, maps + growth, height, width). In the efficient variant, from all features of the
    dense block to a tuple with the new ones at its end. The first layer of a block takes a tensor: a tuple of one tensor never
    occurs, since a chain may unpack it.
    """

    def __init__(self, maps: int, growth: int, dropout: float, efficient: bool) -> None:
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
        self._efficient = efficient

    def forward(self, features: Features) -> Features:
        if self._efficient:
            features = as_arguments(features)
            return (*features, _run(self, features))
        return torch.cat([features, super().forward(features)], dim=1)  # type: ignore[list-item]


class Transition(nn.Sequential):
    """Transition between dense blocks, to half the feature maps at half the resolution; always to one tensor."""

    def __init__(self, maps: int, efficient: bool) -> None:
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.Conv2d(maps, maps // 2, kernel_size=1, bias=False),
            nn.AvgPool2d(kernel_size=2, stride=2),
        )
        self._efficient = efficient

    def forward(self, features: Features) -> torch.Tensor:
        return _run(self, as_arguments(features)) if self._efficient else super().forward(features)


class Classifier(nn.Sequential):
    """Classifier, from the average of the last features over the image to scores (batch, classes).

    Nothing is recomputed here in the efficient variant, since the backward pass begins here.
    """

    def __init__(self, maps: int, classes: int) -> None:
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(maps, classes),
        )

    def forward(self, features: Features) -> torch.Tensor:
        joined = torch.cat(features, dim=1) if isinstance(features, tuple) else features
        return super().forward(joined)


class DenseNet(nn.Sequential):
    """A DenseNet whose children are its blocks: stem, dense layers, transitions, classifier.

    The input is (batch, channels, height, width), the output (batch, classes) of scores before the softmax. Height and width are
    halved several times: they must be at least 32 with the ImageNet stem, and 4 with the CIFAR stem and three blocks.
    """

    def __init__(
        self, shape: DenseNetShape, channels: int, classes: int, dropout: float = 0.0, efficient: bool = False
    ) -> None:
        if shape.large_images:
            stem = imagenet_stem(channels, shape.initial)
        else:
            stem = nn.Conv2d(channels, shape.initial, kernel_size=3, padding=1, bias=False)
        chain: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
        maps = shape.initial
        for block, layers in enumerate(shape.blocks, start=1):
            if block > 1:
                chain[f"transition{block - 1}"] = Transition(maps, efficient)
                maps //= 2
            for layer in range(1, layers + 1):
                chain[f"block{block}_layer{layer}"] = DenseLayer(maps, shape.growth, dropout, efficient)
                maps += shape.growth
        chain["classifier"] = Classifier(maps, classes)
        super().__init__(chain)
        self.apply(initialize)


@validated
def densenet(
    depth: int,
    *,
    channels: Size = 3,
    classes: Size = 1000,
    dropout: Probability = 0.0,
    efficient: bool = False,
) -> DenseNet:
    """A randomly initialized DenseNet of a given depth.

    Args:
        depth: a key of :data:`DENSENETS`.
        dropout: dropout probability of the features that each dense layer adds.
        efficient: whether to recompute concatenations, norms and activations inside each layer (Pleiss et al., 2017).

    Raises:
        ValueError: the depth is unknown, or an option is invalid.
    """
    if depth not in DENSENETS:
        raise ValueError(
            f"no DenseNet of depth {depth}: choose one of {', '.join(map(str, sorted(DENSENETS)))}"
        )
    return DenseNet(DENSENETS[depth], channels, classes, dropout, efficient)


def _run(block: nn.Sequential, features: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Runs a dense layer or a transition without keeping the outputs of concatenation, norm and activation."""
    # The convolution is in the region so that its input is recomputed as well. The recomputation stops when all saved tensors are
    # recomputed, which is before the convolution would run.
    norm, activation, convolution, *others = block

    def narrow(*features: torch.Tensor) -> torch.Tensor:
        return convolution(activation(norm(torch.cat(features, dim=1))))

    result: torch.Tensor = checkpoint(narrow, *features, preserve_rng_state=False)  # nothing in it is random
    for module in others:
        result = module(result)
    return result
