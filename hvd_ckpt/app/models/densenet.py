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

from hvd_ckpt.app.models.catalog import DENSENETS, DenseNetShape, at_least_1, check_dropout
from hvd_ckpt.app.models.resnet import imagenet_stem, initialize
from hvd_ckpt.recompute import checkpoint
from hvd_ckpt.recompute.sequential import as_arguments

BOTTLENECK = 4  # a bottleneck has 4 * growth feature maps (section 3 of the paper, "Bottleneck layers")

Features = torch.Tensor | tuple[torch.Tensor, ...]


class Bottleneck(nn.Sequential):
    """A 1x1 convolution to ``BOTTLENECK * growth`` maps and a 3x3 convolution, each after norm and activation."""

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


class DenseLayer(Bottleneck):
    """Dense layer, from (batch, maps, height, width) to (batch, maps + growth, height, width)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = super().forward(features)  # type: ignore[no-untyped-call]
        return torch.cat([features, added], dim=1)


class EfficientDenseLayer(Bottleneck):
    """Dense layer of the efficient variant, from all features of the dense block to a tuple with the new ones, (batch, growth,
    height, width), at its end.

    The first layer of a block takes a tensor. A tuple of one tensor never occurs, since a chain may unpack it.
    """

    def forward(self, features: Features) -> tuple[torch.Tensor, ...]:
        features = as_arguments(features)
        return (*features, _run(self, features))


class Transition(nn.Sequential):
    """Transition between dense blocks, to half the feature maps at half the resolution."""

    def __init__(self, maps: int) -> None:
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.Conv2d(maps, maps // 2, kernel_size=1, bias=False),
            nn.AvgPool2d(kernel_size=2, stride=2),
        )


class EfficientTransition(Transition):
    """Transition of the efficient variant, from all features of a dense block to one tensor."""

    def forward(self, features: Features) -> torch.Tensor:
        return _run(self, as_arguments(features))


class Classifier(nn.Sequential):
    """Classifier, from the average of the last features over the image to scores (batch, classes)."""

    def __init__(self, maps: int, classes: int) -> None:
        super().__init__(
            nn.BatchNorm2d(maps),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(maps, classes),
        )


class EfficientClassifier(Classifier):
    """Classifier of the efficient variant, which takes all features of the last dense block.

    Nothing is recomputed here, since the backward pass begins here.
    """

    def forward(self, features: Features) -> torch.Tensor:
        scores: torch.Tensor = super().forward(torch.cat(as_arguments(features), dim=1))  # type: ignore[no-untyped-call]
        return scores


class DenseNet(nn.Sequential):
    """A DenseNet whose children are its blocks: stem, dense layers, transitions, classifier.

    The input is (batch, channels, height, width), the output (batch, classes) of scores before the softmax. Height and width are
    halved several times: they must be at least 32 with the ImageNet stem, and 4 with the CIFAR stem and three blocks.

    Raises:
        ValueError: ``dropout`` is outside [0, 1), or channels or classes are below 1.
    """

    def __init__(
        self, shape: DenseNetShape, channels: int, classes: int, dropout: float = 0.0, efficient: bool = False
    ) -> None:
        at_least_1(channels=channels, classes=classes)
        check_dropout(dropout)
        layer_class = EfficientDenseLayer if efficient else DenseLayer
        transition_class = EfficientTransition if efficient else Transition
        classifier_class = EfficientClassifier if efficient else Classifier
        if shape.large_images:
            stem = imagenet_stem(channels, shape.initial)
        else:
            stem = nn.Conv2d(channels, shape.initial, kernel_size=3, padding=1, bias=False)
        chain: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
        maps = shape.initial
        for block, layers in enumerate(shape.blocks, start=1):
            if block > 1:
                chain[f"transition{block - 1}"] = transition_class(maps)
                maps //= 2
            for layer in range(1, layers + 1):
                chain[f"block{block}_layer{layer}"] = layer_class(maps, shape.growth, dropout)
                maps += shape.growth
        chain["classifier"] = classifier_class(maps, classes)
        super().__init__(chain)
        self.apply(initialize)


def densenet(
    depth: int, *, channels: int = 3, classes: int = 1000, dropout: float = 0.0, efficient: bool = False
) -> DenseNet:
    """A randomly initialized DenseNet of a given depth.

    Args:
        depth: a key of :data:`DENSENETS`.
        channels: number of channels of the images.
        classes: number of classes.
        dropout: dropout probability of the features that each dense layer adds.
        efficient: whether to recompute concatenations, norms and activations inside each layer (Pleiss et al., 2017).

    Raises:
        ValueError: the depth is unknown; see also :class:`DenseNet`.
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
        narrowed: torch.Tensor = convolution(activation(norm(torch.cat(features, dim=1))))
        return narrowed

    result: torch.Tensor = checkpoint(narrow, *features, preserve_rng_state=False)  # nothing in it is random
    for module in others:
        result = module(result)
    return result
