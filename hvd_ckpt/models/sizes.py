"""Sizes of models: the numbers of published DenseNets and ResNets, and what sizes must be; imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("sdpa", "eager")
"""Implementations of attention: fused, or one operation after the other."""


def check_sizes(
    vocabulary: int,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    length: int = 1,
    attention: str = "sdpa",
) -> None:
    """Validates the sizes of a transformer.

    Raises:
        ValueError: heads do not divide the width, another size is below 1, the dropout is outside [0, 1), or the attention is not
            one of :data:`ATTENTION`.
    """
    at_least_1(vocabulary=vocabulary, length=length, layers=layers, heads=heads, width=width)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
    check_dropout(dropout)
    if attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTION))}, got {attention!r}")


def at_least_1(**sizes: int) -> None:
    """Raises ValueError, with its name, for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_dropout(dropout: float) -> None:
    """Raises ValueError for a probability outside [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")


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


DENSENETS: dict[int, DenseNetShape] = {
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


@dataclass(frozen=True)
class ResNetShape:
    """The numbers that tell one ResNet from another.

    Attributes:
        unit: "basic" (two 3x3 convolutions), "bottleneck" (1x1, 3x3, 1x1) or "preactivated" (a bottleneck whose norms and
            activations come before the convolutions).
        units: residual units in each stage; from one stage to the next maps double and resolution halves.
        maps: of the 3x3 convolutions in the first stage.
        large_images: the ImageNet stem (7x7 convolution and pooling, a quarter of the resolution is left) and shortcuts that
            project, or the CIFAR stem (3x3 convolution at full resolution) and, for basic units, shortcuts that pad with zeros.
    """

    unit: str
    units: tuple[int, ...]
    maps: int
    large_images: bool


RESNETS: dict[int, ResNetShape] = {
    18: ResNetShape("basic", (2, 2, 2, 2), 64, large_images=True),
    34: ResNetShape("basic", (3, 4, 6, 3), 64, large_images=True),
    50: ResNetShape("bottleneck", (3, 4, 6, 3), 64, large_images=True),
    101: ResNetShape("bottleneck", (3, 4, 23, 3), 64, large_images=True),
    152: ResNetShape("bottleneck", (3, 8, 36, 3), 64, large_images=True),
    **{
        depth: ResNetShape("basic", ((depth - 2) // 6,) * 3, 16, large_images=False)
        for depth in (20, 32, 44, 56, 110, 1202)
    },
    **{
        depth: ResNetShape("preactivated", ((depth - 2) // 9,) * 3, 16, large_images=False)
        for depth in (164, 1001)
    },
}
"""The papers' networks by depth: convolutions and the classifier, without those in shortcuts."""
