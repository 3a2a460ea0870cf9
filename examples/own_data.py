"""Images in tar files of WebDataset for ``hvd-ckpt train``: ``000.jpg`` beside ``000.cls``, the number of its class.

    cd examples
    IMAGES=shards horovodrun -np 2 hvd-ckpt train --model own_models:vit --data own_data:images \\
        --loss torch.nn.functional:cross_entropy

The images must have 8 x 8 pixels, as ``own_models:vit`` expects. The headers of the tar files are read once. Each sample is then
read at its place in a file, in the order that follows from seed and epoch.
"""

import io
import os
import tarfile
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

PICTURES = ("jpg", "jpeg", "png")


class TarImages(Dataset):
    """Samples of uncompressed tar files: grey images (1, height, width) from 0 to 1, all of one size, and their classes."""

    channels = 1

    def __init__(self, folder: str) -> None:
        self.samples, labels = [], []
        for path in sorted(Path(folder).glob("*.tar")):
            places: dict[str, dict[str, tuple[int, int]]] = {}
            with tarfile.open(path, "r:") as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    parent, _, name = member.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    places.setdefault(f"{parent}/{key}", {})[suffix] = (member.offset_data, member.size)
            for key, of in places.items():
                image = next((of[suffix] for suffix in PICTURES if suffix in of), None)
                if image is None or "cls" not in of:
                    raise ValueError(f"'{path}': sample {key} lacks its image or its .cls")
                self.samples.append((path, *image))
                labels.append(int(self.read(path, *of["cls"])))
        if not labels:
            raise ValueError(f"there are no samples in the .tar files of '{folder}'")
        self.labels, self.classes = labels, max(labels) + 1

    @staticmethod
    def read(path: Path, offset: int, size: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self.read(*self.samples[index]))) as image:
            pixels = numpy.array(image.convert("L"), dtype=numpy.float32)
        return torch.from_numpy(pixels)[None] / 255, self.labels[index]


def images() -> Dataset:
    """The samples in the folder that the environment variable IMAGES names; ``--validation-split`` sets some apart."""
    return TarImages(os.environ["IMAGES"])
