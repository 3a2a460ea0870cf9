"""V-Net, a network for the segmentation of volumes, as a chain.

The network is that of Milletari, Navab, Ahmadi, "V-Net: Fully Convolutional Neural Networks for Volumetric Medical Image
Segmentation" (2016). Four stages lead down to a sixteenth of the resolution, and four lead up again. Each stage on the way up also
gets the features of the same resolution from the way down.

These skip connections span most of the network. To form a chain, a stage takes and returns a tuple of the current features and of
all features that later stages need, the newest first. A cut between two stages then cuts all skip connections across it, and
nothing is kept outside of the chain.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from hvd_ckpt.app.models.options import Size, validated
from hvd_ckpt.recompute.sequential import as_arguments

# Convolutions of each stage on the way down, after a first stage with one (figure 2), and on the way up.
DOWN, UP = (2, 3, 3, 3), (3, 3, 2, 1)
SCALE = 2 ** len(DOWN)
KERNEL = 5

NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "batch": nn.BatchNorm3d,
    "instance": lambda maps: nn.InstanceNorm3d(maps, affine=True),
    "none": None,
}
"""Normalization after each convolution. The paper has none; most later implementations have a batch norm."""

Flow = torch.Tensor | tuple[torch.Tensor, ...]


class Residual(nn.Module):
    """Convolutions of 5x5x5 with a residual connection, from and to (batch, maps, depth, height, width)."""

    def __init__(self, maps: int, convolutions: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(convolutions):
            layers += [nn.PReLU(maps)] if index else []
            layers += _normalized(nn.Conv3d(maps, maps, KERNEL, padding=KERNEL // 2), norm)
        self.convolutions = nn.Sequential(*layers)
        self.activation = nn.PReLU(maps)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.activation(self.convolutions(features) + features)


class Entry(nn.Module):
    """The first stage, from (batch, channels, depth, height, width) to ``width`` maps. A channel is added to each map.

    Raises:
        ValueError: the volume has another number of channels, or a side that cannot be halved four times.
    """

    def __init__(self, channels: int, width: int, norm: str) -> None:
        super().__init__()
        self.channels = channels
        self.convolution = nn.Sequential(
            *_normalized(nn.Conv3d(channels, width, KERNEL, padding=KERNEL // 2), norm)
        )
        self.activation = nn.PReLU(width)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        if volume.dim() != 5 or volume.shape[1] != self.channels:
            raise ValueError(
                f"this V-Net takes volumes of shape (batch, {self.channels}, depth, height, width), got {tuple(volume.shape)}"
            )
        if any(side % SCALE for side in volume.shape[2:]):
            sides = " x ".join(map(str, volume.shape[2:]))
            raise ValueError(
                f"the sides of a V-Net's volume must be multiples of {SCALE}, got {sides}: pad or crop it"
            )
        convolved: torch.Tensor = self.convolution(volume)
        # A view of the maps in groups of the size of the channels, so that the channels are repeated without a copy.
        groups = convolved.reshape(len(volume), -1, *volume.shape[1:])
        return self.activation((groups + volume.unsqueeze(1)).flatten(1, 2))


class Down(nn.Module):
    """A stage on the way down, to twice the maps at half the resolution. Its input stays in the tuple for the way up."""

    def __init__(self, maps: int, convolutions: int, norm: str) -> None:
        super().__init__()
        self.downsample = nn.Sequential(
            *_normalized(nn.Conv3d(maps, 2 * maps, kernel_size=2, stride=2), norm), nn.PReLU(2 * maps)
        )
        self.residual = Residual(2 * maps, convolutions, norm)

    def forward(self, flow: Flow) -> Flow:
        features, *_ = taken = as_arguments(flow)
        return self.residual(self.downsample(features)), *taken


class Up(nn.Module):
    """A stage on the way up, to twice the resolution. It removes the newest features from the tuple and joins them.

    It has ``maps`` input maps and ``made`` output maps, half of which come from below and half from the way down.
    """

    def __init__(self, maps: int, made: int, convolutions: int, norm: str) -> None:
        super().__init__()
        self.upsample = nn.Sequential(
            *_normalized(nn.ConvTranspose3d(maps, made // 2, kernel_size=2, stride=2), norm),
            nn.PReLU(made // 2),
        )
        self.residual = Residual(made, convolutions, norm)

    def forward(self, flow: Flow) -> Flow:
        features, skipped, *later = as_arguments(flow)
        made: torch.Tensor = self.residual(torch.cat([self.upsample(features), skipped], dim=1))
        return (made, *later) if later else made  # not a tuple of one, which a chain may unpack


class VNet(nn.Sequential):
    """A randomly initialized V-Net whose children are its stages: entry, four down, four up, and a 1x1x1 convolution.

    The input is (batch, channels, depth, height, width), the output (batch, classes, depth, height, width) of scores before the
    softmax. Depth, height and width must be multiples of 16. The defaults are those of the paper, except for ``norm``, which is
    ``"none"`` there.

    Args:
        width: number of maps of the first stage; the deepest stage has 16 times as many.
        norm: normalization after each convolution except the last, a key of :data:`NORMS`. Batch norm needs more than one value per
            channel: at least two volumes if their sides are 16.

    Raises:
        ValueError: the norm is unknown, the width is not a multiple of channels, or, in the
            forward pass, the volume has another shape.
    """

    @validated
    def __init__(
        self, *, channels: Size = 1, classes: Size = 2, width: Size = 16, norm: str = "batch"
    ) -> None:
        if width % channels:
            raise ValueError(
                f"width must be a multiple of channels, got width={width} and channels={channels}"
            )
        if norm not in NORMS:
            raise ValueError(f"no norm {norm!r}: choose one of {', '.join(NORMS)}")
        # The maps of each stage's output, as multiples of the width, and behind them those that wait for the way up:
        #
        #     entry    1
        #     down1    2 1             up4    2           joins 1
        #     down2    4 2 1           up3    4 1         joins 2
        #     down3    8 4 2 1         up2    8 2 1       joins 4
        #     down4    16 8 4 2 1      up1    16 4 2 1    joins 8
        chain: OrderedDict[str, nn.Module] = OrderedDict(entry=Entry(channels, width, norm))
        maps = width
        for stage, convolutions in enumerate(DOWN, start=1):
            chain[f"down{stage}"] = Down(maps, convolutions, norm)
            maps *= 2
        for stage, convolutions in enumerate(UP, start=1):
            made = width * 2 ** (len(UP) - stage + 1)  # twice the maps on the way down at this resolution
            chain[f"up{stage}"] = Up(maps, made, convolutions, norm)
            maps = made
        chain["classifier"] = nn.Conv3d(maps, classes, kernel_size=1)
        super().__init__(chain)
        self.apply(_initialize)


def _normalized(convolution: nn.Conv3d | nn.ConvTranspose3d, norm: str) -> list[nn.Module]:
    build = NORMS[norm]
    return [convolution] if build is None else [convolution, build(convolution.out_channels)]


def _initialize(module: nn.Module) -> None:
    """Initialization by He et al. ("Delving Deep into Rectifiers", 2015) for PReLU: variance 2 / (1 + slope**2) per input."""
    if isinstance(module, nn.Conv3d):
        inputs = module.in_channels * math.prod(module.kernel_size)
    elif isinstance(module, nn.ConvTranspose3d):
        # Kernel and stride are equal, so each voxel comes from one input voxel.
        inputs = module.in_channels
    else:
        return
    slope = 0.25  # initial slope of nn.PReLU
    nn.init.normal_(module.weight, std=math.sqrt(2 / (1 + slope**2) / inputs))
    if module.bias is not None:
        nn.init.zeros_(module.bias)
