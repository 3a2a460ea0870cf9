"""Images and their classes: scikit-learn's digits, folders, arrays.

Images are standardised, channel by channel: digits and arrays by mean and deviation of the samples trained on, images of a
folder, which are decoded when they are asked for, by the constants that are usual for photographs.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hvd_ckpt.data.array_files import Source, channel_statistics, load
from hvd_ckpt.data.dataset import Purpose, StandardisedSamples, check_seed, generators, numbers
from hvd_ckpt.models.batch import Batch
from hvd_ckpt.names import one_line

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Digits", "ImageArrays", "ImageFolder", "Images", "open_images"]

Integers = NDArray[numpy.int64]

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others call programs, or are hardly tested
MOST_PIXELS = 1 << 26  # of an image; a small file may say that it has more than a machine can hold

# Mean and deviation of the photographs of ImageNet, red, green and blue from 0 to 1, as torchvision's models have them.
PHOTOGRAPHS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def open_images(
    source: str | os.PathLike[str] | None, pixels: int, *, seed: int = 0, augment: bool = False
) -> Images:
    """The data set of a folder with a folder of images for each class, of an .npz file, or scikit-learn's digits for None.

    Raises:
        ValueError: there are no images; one sentence.
    """
    if source is None:
        return Digits(pixels, seed=seed, augment=augment)
    if Path(source).is_dir():
        return ImageFolder(source, pixels, seed=seed, augment=augment)
    return ImageArrays(source, pixels, seed=seed, augment=augment)


class Images(StandardisedSamples):
    """Images of ``pixels`` x ``pixels`` and the class of each.

    A batch's inputs are the images (samples, channels, pixels, pixels), float32, and its targets the classes (samples,).

    With ``augment``, an image is moved by up to an eighth of its size in any direction, what comes in being the mean, and
    mirrored in every second case (He et al., "Deep Residual Learning", 2015, section 4.2, where it is 4 of 32 pixels).

    Attributes:
        channels: of each image.
        classes: how many there are.
        pixels: of a side.
    """

    mirrors = True

    def __init__(
        self, labels: Integers, channels: int, classes: int, pixels: int, seed: int, augment: bool
    ) -> None:
        if pixels < 1:
            raise ValueError(f"images of {pixels} pixels: give one at least")
        self.channels = channels
        self.classes = classes
        self.pixels = pixels
        self._seed = check_seed(seed)
        self._augment = augment
        self._labels = labels
        self._chosen = numpy.arange(len(labels))
        self._standardise_by(self._chosen)

    def batch(self, indices: Sequence[int], epoch: Sequence[int]) -> Batch:
        which, epochs = numbers(indices, epoch, len(self))
        which = self._chosen[which]
        images = (self._images(which) - self._mean[:, None, None]) / self._deviation[:, None, None]
        if self._augment:
            images = self._moved(images, which, epochs)
        return Batch((images,), torch.from_numpy(self._labels[which]))

    def split(self, share: float, seed: int | None = None) -> tuple[Self, Self | None]:
        """As of :class:`StandardisedSamples`; the images to evaluate on are never augmented."""
        training, evaluation = super().split(share, seed)
        if evaluation is not None:
            evaluation._augment = False
        return training, evaluation

    @abstractmethod
    def _images(self, which: Integers) -> Tensor:
        """Images as they are, (samples, channels, pixels, pixels), float32."""

    @abstractmethod
    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        """Mean and deviation of each channel of these images."""

    def _standardise_by(self, which: Integers) -> None:
        mean, deviation = self._statistics(which)
        self._mean = torch.as_tensor(mean, dtype=torch.float32)
        self._deviation = torch.as_tensor(deviation, dtype=torch.float32)

    def _moved(self, images: Tensor, which: Integers, epochs: Integers) -> Tensor:
        most = self.pixels // 8
        drawn = numpy.array(
            [
                (*random.integers(0, 2 * most + 1, 2), random.integers(2))
                for random in generators(self._seed, epochs, which, Purpose.AUGMENTATION)
            ]
        )
        down, right, mirrored = torch.from_numpy(drawn).unbind(1)
        along = torch.arange(self.pixels)
        rows = down[:, None] + along
        columns = right[:, None] + along
        if self.mirrors:
            columns = torch.where(mirrored[:, None] == 1, columns.flip(1), columns)
        padded = functional.pad(images, (most, most, most, most))
        sample, channel = torch.arange(len(images)), torch.arange(self.channels)
        return padded[
            sample[:, None, None, None],
            channel[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]


class ImageArrays(Images):
    """Images in an array.

    Args:
        source: an .npz file with ``images`` and ``labels``, or the two arrays. Images are of shape (N, H, W), (N, H, W, C) or
            (N, C, H, W) with 1, 3 or 4 channels, of any type; labels (N,) are whole numbers from 0.
        pixels: of a side, to which images are scaled; by default as they are.
        channels: images of one channel are repeated for as many; by default as they are.
        seed: of augmentation and split.
        augment: move and mirror images at random.

    Raises:
        ValueError: the file is missing or no such file, or arrays do not fit; one sentence.
    """

    def __init__(
        self,
        source: Source,
        pixels: int | None = None,
        *,
        channels: int | None = None,
        seed: int = 0,
        augment: bool = False,
    ) -> None:
        images, labels, name = load(source, "images")
        if labels.ndim != 1:
            raise ValueError(f"{name}: labels are of shape {labels.shape}, give one for each image")
        self._array = _channels_first(images, name)
        found = self._array.shape[1]
        if channels is not None and found not in (1, channels):
            raise ValueError(f"{name}: images have {found} channels, which cannot become {channels}")
        if pixels is None and self._array.shape[2] != self._array.shape[3]:
            raise ValueError(
                f"{name}: images are of shape {images.shape}, not square: say to how many pixels to scale them"
            )
        super().__init__(
            labels.astype(numpy.int64),
            channels or found,
            int(labels.max()) + 1,
            pixels or self._array.shape[2],
            seed,
            augment,
        )

    def _images(self, which: Integers) -> Tensor:
        images = torch.from_numpy(self._array[which].astype(numpy.float32))
        if images.shape[2:] != (self.pixels, self.pixels):
            images = functional.interpolate(
                images, (self.pixels, self.pixels), mode="bilinear", align_corners=False, antialias=True
            )
        return images.expand(-1, self.channels, -1, -1)

    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        return channel_statistics(self._array, which)


class Digits(ImageArrays):
    """The 1797 handwritten digits of scikit-learn (UCI "Optical Recognition of Handwritten Digits"), 8 x 8, scaled.

    They are never mirrored: a mirrored digit is none.

    Args:
        pixels: of a side.
        channels: the one channel is repeated for as many.
        seed: of augmentation and split.
        augment: move images at random.
    """

    mirrors = False

    def __init__(
        self, pixels: int = 32, *, channels: int | None = None, seed: int = 0, augment: bool = False
    ) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        super().__init__(
            (digits.images, digits.target), pixels, channels=channels, seed=seed, augment=augment
        )


class ImageFolder(Images):
    """Images of a folder that has a folder for each class; decoded when they are asked for.

    The classes are the folders in sorted order. Of each, all files at any depth are taken that have a suffix of an image and
    are not hidden. An image is scaled to the shorter side and cut at both ends of the longer one.

    Args:
        folder: the folder.
        pixels: of a side.
        channels: 3 for red, green and blue, or 1 for grey.
        seed: of augmentation and split.
        augment: move and mirror images at random.

    Attributes:
        class_names: the names of the folders.

    Raises:
        ValueError: there is no such folder, or one of a class without images; one sentence. Later, from ``batch``: an image
            cannot be decoded.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        pixels: int,
        *,
        channels: int = 3,
        seed: int = 0,
        augment: bool = False,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"{channels} channels: images of a folder have 3, or 1 in grey")
        try:
            inside = Path(folder).resolve()
            found = {
                path.name: _image_files(path, inside)
                for path in sorted(Path(folder).iterdir())
                if _is_class(path)
            }
        except OSError as error:
            raise ValueError(f"cannot read the image folder '{folder}': {error.strerror}") from None
        if not found:
            raise ValueError(f"the image folder '{folder}' has no folders in it: give it one for each class")
        for name, files in found.items():
            if not files:
                raise ValueError(
                    f"the folder '{Path(folder, name)}' holds no images: a class needs one at least"
                )
        self.class_names = list(found)
        self._files = [file for files in found.values() for file in files]
        labels = numpy.repeat(numpy.arange(len(found)), [len(files) for files in found.values()])
        super().__init__(labels, channels, len(found), pixels, seed, augment)

    def _images(self, which: Integers) -> Tensor:
        decoded = numpy.stack([self._decode(self._files[number]) for number in which])
        images = torch.from_numpy(decoded).float() / 255
        return images.unsqueeze(1) if self.channels == 1 else images.movedim(3, 1).contiguous()

    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        mean, deviation = (torch.tensor(values) for values in PHOTOGRAPHS)
        return (mean, deviation) if self.channels == 3 else (mean.mean()[None], deviation.mean()[None])

    def _decode(self, file: Path) -> NDArray[numpy.uint8]:
        from PIL import Image, ImageOps

        try:
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(
                        f"it has {image.width} x {image.height} pixels, and may have {MOST_PIXELS}"
                    )
                upright = ImageOps.exif_transpose(image).convert("RGB" if self.channels == 3 else "L")
                return numpy.asarray(
                    ImageOps.fit(upright, (self.pixels, self.pixels), Image.Resampling.BILINEAR)
                )
        except Exception as error:  # decoders raise nearly anything for what is damaged
            reason = one_line(str(error)) or type(error).__name__
            raise ValueError(f"cannot decode the image '{file}': {reason}") from None


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _image_files(folder: Path, inside: Path) -> list[Path]:
    """The images below a folder. A link may lead to another place of the data set, and not out of it."""
    if folder.is_symlink():
        _check_link(folder, inside)
    found, folders = [], [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.lower().endswith(SUFFIXES):
                    if entry.is_symlink():
                        _check_link(Path(entry.path), inside)
                    if not entry.is_file():
                        raise ValueError(f"'{entry.path}' is no file: a folder of images holds images")
                    found.append(Path(entry.path))
    return sorted(found)


def _check_link(path: Path, inside: Path) -> None:
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(inside):
        raise ValueError(
            f"'{path}' is a link out of the image folder, to '{target}': copy what it leads to, or leave it out"
        )


def _channels_first(images: NDArray[Any], name: str) -> NDArray[Any]:
    if images.ndim == 3:
        return images[:, None]
    few = (1, 3, 4)
    if images.ndim == 4 and (images.shape[1] in few) != (images.shape[3] in few):
        return images if images.shape[1] in few else numpy.moveaxis(images, 3, 1)
    raise ValueError(
        f"{name}: images are of shape {images.shape}, give (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels"
    )
