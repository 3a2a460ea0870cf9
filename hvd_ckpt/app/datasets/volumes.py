"""Volumes with a class for every voxel, for three-dimensional segmentation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvd_ckpt.app.datasets.arrays import ScaledArrays, Source, load_arrays
from hvd_ckpt.data.dataset import Integers, NumberedSamples, Purpose, generator
from hvd_ckpt.data.objectives import Batch

NOISE = 0.5  # standard deviation of the noise


def open_volumes(
    source: str | os.PathLike[str] | None, pixels: int, *, seed: int = 0
) -> Ellipsoids | VolumeArrays:
    """Opens an .npz file, scaled to ``pixels`` on each side; for None, synthetic ellipsoids."""
    return Ellipsoids(pixels, seed=seed) if source is None else VolumeArrays(source, pixels, seed=seed)


class Ellipsoids(NumberedSamples):
    """Noisy cubes with a bright ellipsoid in each, which are drawn on request and equal in all epochs.

    Place, half axes (from a tenth to a third of the side of the cube) and orientation are random. Voxels are 1 inside and 0
    outside. Normal noise is added, and the volume is standardised.

    The inputs of a batch are the volumes (samples, 1, pixels, pixels, pixels), float32. Its targets are the classes of the voxels
    (samples, pixels, pixels, pixels): 1 inside, 0 outside.
    """

    split_at_random = False
    channels = 1
    classes = 2

    def __init__(self, pixels: int = 32, *, samples: int = 1024, seed: int = 0) -> None:
        super().__init__(samples, seed)
        self.pixels = pixels
        # Centres of the voxels in a cube from -1 to 1.
        along = (2 * numpy.arange(pixels, dtype=numpy.float32) + 1) / pixels - 1
        self._places = numpy.stack(numpy.meshgrid(along, along, along, indexing="ij")).reshape(3, -1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        which, _ = self._find(indices, epoch)
        shape = (len(which), self.pixels, self.pixels, self.pixels)
        volumes = numpy.empty((len(which), self.pixels**3), dtype=numpy.float32)
        labels = numpy.empty(volumes.shape, dtype=numpy.int64)
        for volume, label, sample in zip(volumes, labels, which):
            random = generator(Purpose.VOLUME, self._seed, sample=sample)  # the same in each epoch
            label[:] = self._inside(random)
            random.standard_normal(out=volume, dtype=numpy.float32)
            volume *= NOISE
            volume += label
            volume -= volume.mean()
            volume /= volume.std()
        return Batch(
            (torch.from_numpy(volumes.reshape(shape)).unsqueeze(1),), torch.from_numpy(labels.reshape(shape))
        )

    def _inside(self, random: numpy.random.Generator) -> NDArray[numpy.bool_]:
        axes = random.uniform(0.2, 2 / 3, 3)
        centre = random.uniform(-0.5, 0.5, 3)
        rotation = numpy.linalg.qr(random.standard_normal((3, 3)))[0]
        to_sphere = (rotation / axes).T.astype(numpy.float32)
        places = to_sphere @ (self._places - centre.astype(numpy.float32)[:, None])
        return numpy.einsum("ij,ij->j", places, places) <= 1


class VolumeArrays(ScaledArrays):
    """Arrays of volumes and of the classes of their voxels, standardised by the mean and deviation of the training samples.

    Batches have the form of those of :class:`Ellipsoids`.

    Args:
        source: an .npz file with ``volumes`` and ``labels``, or the two arrays, each (N, D, H, W). Labels are whole numbers from 0.
        pixels: number of pixels of a side, to which volumes and labels are scaled (labels to the nearest voxel). By default, they
            keep their size.

    Raises:
        ValueError: the file is missing or invalid, or the shapes of the arrays are invalid. The message is one sentence.
    """

    scaling: ClassVar[Mapping[str, Any]] = {"mode": "trilinear"}

    def __init__(self, source: Source, pixels: int | None = None, *, seed: int = 0) -> None:
        volumes, labels, name = load_arrays(source, "volumes")
        if volumes.ndim != 4 or volumes.shape != labels.shape:
            raise ValueError(
                f"{name}: volumes are of shape {volumes.shape} and labels {labels.shape}, give both as (N, D, H, W)"
            )
        shape = volumes.shape[1:] if pixels is None else (pixels,) * 3
        super().__init__(volumes[:, None], labels, shape, seed)

    def _targets(self, which: Integers) -> Tensor:
        labels = super()._targets(which)
        if labels.shape[1:] != self._shape:
            scaled = functional.interpolate(labels[:, None].float(), self._shape, mode="nearest-exact")
            labels = scaled[:, 0].long()
        return labels
