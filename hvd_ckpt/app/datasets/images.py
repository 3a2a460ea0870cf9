"""Images and their classes: scikit-learn's digits, folders, arrays.

Images are standardised by channel. Digits and arrays use the mean and deviation of the training samples. Images of a folder, which
are decoded on request, use the usual constants for photographs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_ckpt.app.datasets.arrays import ScaledArrays, Source, StandardisedSamples, load_arrays
from hvd_ckpt.app.datasets.tokens import visible_files
from hvd_ckpt.data.dataset import Integers
from hvd_ckpt.utils.text import one_line

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # decoders of other formats start programs

# Mean and deviation of the photographs of ImageNet, for red, green and blue from 0 to 1, as in the models of torchvision.
PHOTOGRAPHS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def open_images(source: str | os.PathLike[str] | None, pixels: int, *, seed: int = 0) -> StandardisedSamples:
    """Opens a folder with a folder of images for each class, or an .npz file; for None, scikit-learn's digits.

    The inputs of a batch are images (samples, channels, pixels, pixels), and its targets are their classes (samples,).
    """
    if source is None:
        return Digits(pixels, seed=seed)
    if Path(source).is_dir():
        return ImageFolder(source, pixels, seed=seed)
    return ImageArrays(source, pixels, seed=seed)


class ImageArrays(ScaledArrays):
    """Images in an array.

    Args:
        source: an .npz file with ``images`` and ``labels``, or the two arrays. Images are of shape (N, H, W), (N, H, W, C) or (N,
            C, H, W) with 1, 3 or 4 channels, of any type. Labels (N,) are whole numbers from 0.
        pixels: number of pixels of a side, to which images are scaled; by default, they keep their size.

    Raises:
        ValueError: the file is missing or invalid, or the shapes of the arrays are invalid. The message is one sentence.
    """

    scaling: ClassVar[Mapping[str, Any]] = {"mode": "bilinear", "antialias": True}

    def __init__(self, source: Source, pixels: int | None = None, *, seed: int = 0) -> None:
        images, labels, name = load_arrays(source, "images")
        if labels.ndim != 1:
            raise ValueError(f"{name}: labels are of shape {labels.shape}, give one for each image")
        array = _channels_first(images, name)
        height, width = array.shape[2:]
        if pixels is None and height != width:
            raise ValueError(
                f"{name}: images are of shape {images.shape}, not square: say to how many pixels to scale them"
            )
        super().__init__(array, labels, (pixels or height,) * 2, seed)


class Digits(ImageArrays):
    """The 1797 handwritten digits of scikit-learn (UCI "Optical Recognition of Handwritten Digits"), 8 x 8, scaled."""

    def __init__(self, pixels: int = 32, *, seed: int = 0) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        super().__init__((digits.images, digits.target), pixels, seed=seed)


class ImageFolder(StandardisedSamples):
    """Images of a folder with a folder for each class, which are decoded on request.

    The classes are the folders in sorted order. The images of a class are all files at any depth that have the suffix of an image
    and are not hidden. An image is scaled by its shorter side and cropped at both ends of its longer side.

    Raises:
        ValueError: the folder is missing, or a class has no images. Later, from ``batch``: an image cannot be decoded. The message
            is one sentence.
    """

    def __init__(self, folder: str | os.PathLike[str], pixels: int, *, seed: int = 0) -> None:
        try:
            classes = {
                path.name: [
                    file for file in visible_files(path) if file.suffix.lower() in SUFFIXES and file.is_file()
                ]
                for path in sorted(Path(folder).iterdir())
                if path.is_dir() and not path.name.startswith(".")
            }
        except OSError as error:
            raise ValueError(f"cannot read the image folder '{folder}': {error.strerror}") from None
        if not classes:
            raise ValueError(f"the image folder '{folder}' has no folders in it: give it one for each class")
        for name, files in classes.items():
            if not files:
                raise ValueError(
                    f"the folder '{Path(folder, name)}' holds no images: a class needs one at least"
                )
        self.class_names = list(classes)
        self._files = [file for files in classes.values() for file in files]
        self._pixels = pixels
        labels = numpy.repeat(numpy.arange(len(classes)), [len(files) for files in classes.values()])
        super().__init__(labels, 3, len(classes), seed)

    def _samples(self, which: Integers) -> Tensor:
        decoded = numpy.stack([self._decode(self._files[number]) for number in which])
        return (torch.from_numpy(decoded).float() / 255).movedim(3, 1).contiguous()

    def _statistics(self, which: Integers) -> tuple[Any, Any]:
        return PHOTOGRAPHS

    def _decode(self, file: Path) -> NDArray[numpy.uint8]:
        from PIL import Image, ImageOps

        try:
            with Image.open(file, formats=FORMATS) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                return numpy.asarray(
                    ImageOps.fit(upright, (self._pixels, self._pixels), Image.Resampling.BILINEAR)
                )
        except Exception as error:  # decoders raise nearly anything for a damaged file
            reason = one_line(str(error)) or type(error).__name__
            raise ValueError(f"cannot decode the image '{file}': {reason}") from None


def _channels_first(images: NDArray[Any], name: str) -> NDArray[Any]:
    if images.ndim == 3:
        return images[:, None]
    few = (1, 3, 4)
    if images.ndim == 4 and (images.shape[1] in few) != (images.shape[3] in few):
        return images if images.shape[1] in few else numpy.moveaxis(images, 3, 1)
    raise ValueError(
        f"{name}: images are of shape {images.shape}, give (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels"
    )
