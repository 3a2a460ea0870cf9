"""Models, data, loss and metrics for ``hvd-ckpt train``, from a module of your own: a U-Net and a vision transformer.

    cd examples
    horovodrun -np 2 hvd-ckpt train --model own_models:unet --data own_models:shapes --loss own_models:pixel_loss \\
        --metric iou=own_models:iou
    horovodrun -np 2 hvd-ckpt train --model own_models:vit --data own_models:digits --loss torch.nn.functional:cross_entropy

Both models are chains (``nn.Sequential``), so ``--pipeline 2`` cuts them into stages. The skip connections of the U-Net have
names and go directly to the stage that needs them. A model with such connections cannot be planned, so ``--budget 0.5x`` works
for the vision transformer only.
"""

from itertools import pairwise

import numpy
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import hvd_ckpt as hc


def convolutions(maps: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(maps, made, 3, padding=1, bias=False),
        nn.BatchNorm2d(made),
        nn.ReLU(),
        nn.Conv2d(made, made, 3, padding=1, bias=False),
        nn.BatchNorm2d(made),
        nn.ReLU(),
    )


@hc.skip.skippable(stash=["skip"])
class Down(nn.Module):
    """Convolutions; half the resolution goes on, the whole one goes to the ``Up`` of this level."""

    def __init__(self, maps: int, made: int) -> None:
        super().__init__()
        self.convolutions = convolutions(maps, made)

    def forward(self, image):
        features = self.convolutions(image)
        yield hc.skip.stash("skip", features)
        return functional.max_pool2d(features, 2)


@hc.skip.skippable(pop=["skip"])
class Up(nn.Module):
    """Twice the resolution, joined with what the ``Down`` of this level stashed."""

    def __init__(self, maps: int, made: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(maps, made, 2, stride=2)
        self.convolutions = convolutions(2 * made, made)

    def forward(self, features):
        skip = yield hc.skip.pop("skip")
        return self.convolutions(torch.cat([self.upsample(features), skip], dim=1))


def unet(channels: int = 1, classes: int = 2, width: int = 8, levels: int = 2) -> nn.Sequential:
    """A U-Net (Ronneberger et al., 2015): images (batch, channels, height, width), scores (batch, classes, height, width)."""
    maps = [channels, *(width * 2**level for level in range(levels))]
    downs = [Down(*pair).isolate(level) for level, pair in enumerate(pairwise(maps))]
    ups = [Up(2 * made, made).isolate(level) for level, made in enumerate(maps[1:])]
    return nn.Sequential(
        *downs, convolutions(maps[-1], 2 * maps[-1]), *reversed(ups), nn.Conv2d(width, classes, 1)
    )


class Shapes(Dataset):
    """Noisy images of a disc, and the pixels that it covers. The model gets ``channels`` and ``classes`` from here."""

    channels, classes = 1, 2

    def __init__(self, first: int, count: int, side: int = 16) -> None:
        self.first, self.count, self.side = first, count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = numpy.random.default_rng(
            self.first + index
        )  # the same sample in every run and on every rank
        y, x = numpy.mgrid[: self.side, : self.side]
        center, radius = random.uniform(4, self.side - 4, 2), random.uniform(2, 5)
        disc = (y - center[0]) ** 2 + (x - center[1]) ** 2 < radius**2
        image = disc + random.normal(0, 0.5, disc.shape)
        return torch.from_numpy(image).float()[None], torch.from_numpy(disc).long()


def shapes() -> tuple[Dataset, Dataset]:
    """Samples to train and to evaluate on."""
    return Shapes(0, 512), Shapes(512, 64)


def pixel_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def iou(output: Tensor, target: Tensor) -> Tensor:
    """Intersection over union of each image's disc, the mean over images."""
    found, wanted = output.argmax(1).bool(), target.bool()
    return ((found & wanted).sum((1, 2)) / (found | wanted).sum((1, 2)).clamp(min=1)).mean()


class Patches(nn.Module):
    """Images (batch, 1, height, width) to vectors of their patches, with learned positions: (batch, patches, width)."""

    def __init__(self, patch: int, patches: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))

    def forward(self, image: Tensor) -> Tensor:
        return self.embed(image).flatten(2).transpose(1, 2) + self.positions


class Head(nn.Module):
    """Scores (batch, classes) of the mean over patches."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, patches: Tensor) -> Tensor:
        return self.linear(patches.mean(1))


def vit(classes: int = 10, width: int = 32, layers: int = 2, heads: int = 2) -> nn.Sequential:
    """A vision transformer (Dosovitskiy et al., 2021) for images of 8 x 8 pixels."""
    blocks = [
        nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(Patches(2, 16, width), *blocks, Head(width, classes))


def digits() -> Dataset:
    """scikit-learn's handwritten digits; ``--validation-split`` says how many of them to evaluate on."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()
    )
