"""Volumes with a class for every voxel, for three-dimensional segmentation."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch.nn import functional

from hvd_ckpt.data.dataset import (
    ConsecutiveSamples,
    Purpose,
    Source,
    StandardisedSamples,
    channel_statistics,
    check_samples,
    generators,
    load_arrays,
)
from hvd_ckpt.data.objectives import Batch

NOISE = 0.5  # its standard deviation


def open_volumes(
    source: str | os.PathLike[str] | None, pixels: int, *, seed: int = 0
) -> Ellipsoids | VolumeArrays:
    """The data set of an .npz file, scaled to ``pixels`` on each side, or synthetic ellipsoids for None.

    Raises:
        ValueError: the file is missing or not such a file; one sentence.
    """
    return Ellipsoids(pixels, seed=seed) if source is None else VolumeArrays(source, pixels, seed=seed)


class Ellipsoids(ConsecutiveSamples):
    """Noisy cubes, each with a bright ellipsoid in it to be found; drawn when they are asked for, the same in each epoch.

    Place, half axes (from a tenth to a third of the cube's side) and orientation are random. Voxels are 1 inside and 0 outside,
    with normal noise added and the whole standardised.

    A batch's inputs are the volumes (samples, 1, pixels, pixels, pixels), float32, and its targets the classes of the voxels
    (samples, pixels, pixels, pixels): 1 inside, 0 outside.

    Args:
        pixels: of a side.
        samples: how many there are.
        seed: of all of them.
    """

    channels = 1
    classes = 2

    def __init__(self, pixels: int = 32, *, samples: int = 1024, seed: int = 0) -> None:
        super().__init__(samples, seed)
        self.pixels = pixels
        # Centres of the voxels in a cube from -1 to 1.
        along = (2 * numpy.arange(pixels, dtype=numpy.float32) + 1) / pixels - 1
        self._places = numpy.stack(numpy.meshgrid(along, along, along, indexing="ij")).reshape(3, -1)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        which, epochs = check_samples(indices, epoch, len(self))
        shape = (len(which), self.pixels, self.pixels, self.pixels)
        volumes = numpy.empty((len(which), self.pixels**3), dtype=numpy.float32)
        labels = numpy.empty(volumes.shape, dtype=numpy.int64)
        drawn = generators(Purpose.VOLUME, self._seed, numpy.zeros_like(epochs), which + self._first)
        for volume, label, random in zip(volumes, labels, drawn):
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
        inside: NDArray[numpy.bool_] = numpy.einsum("ij,ij->j", places, places) <= 1
        return inside


class VolumeArrays(StandardisedSamples):
    """Volumes and the classes of their voxels, in arrays; standardised by mean and deviation of the samples trained on.

    A batch is as that of :class:`Ellipsoids`.

    Args:
        source: an .npz file with ``volumes`` and ``labels``, or the two arrays, each (N, D, H, W); labels are whole numbers
            from 0.
        pixels: of a side, to which volumes and labels are scaled (labels to the nearest voxel); by default as they are.
        seed: of the split.

    Raises:
        ValueError: the file is missing or not such a file, or arrays do not fit; one sentence.
    """

    channels = 1

    def __init__(self, source: Source, pixels: int | None = None, *, seed: int = 0) -> None:
        volumes, labels, name = load_arrays(source, "volumes")
        if volumes.ndim != 4 or volumes.shape != labels.shape:
            raise ValueError(
                f"{name}: volumes are of shape {volumes.shape} and labels {labels.shape}, give both as (N, D, H, W)"
            )
        self.classes = int(labels.max()) + 1
        self._volumes = volumes
        self._labels = labels
        self._shape = tuple(volumes.shape[1:]) if pixels is None else (pixels,) * 3
        self._seed = seed
        self._chosen = numpy.arange(len(volumes))
        self._standardise_by(self._chosen)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        which = self._chosen[check_samples(indices, epoch, len(self))[0]]
        volumes = torch.from_numpy(self._volumes[which].astype(numpy.float32)).unsqueeze(1)
        labels = torch.from_numpy(self._labels[which].astype(numpy.int64))
        if volumes.shape[2:] != self._shape:
            volumes = functional.interpolate(volumes, self._shape, mode="trilinear", align_corners=False)
            labels = functional.interpolate(labels[:, None].float(), self._shape, mode="nearest-exact")[
                :, 0
            ].long()
        return Batch(((volumes - self._mean) / self._deviation,), labels)

    def _standardise_by(self, which: NDArray[numpy.int64]) -> None:
        mean, deviation = channel_statistics(self._volumes[:, None], which)
        self._mean, self._deviation = float(mean[0]), float(deviation[0])
