"""Real data that is on every machine: scikit-learn's handwritten digits, and text as bytes.

Batches are a pure function of seed, rank and step, so that a rank, the reference and a second run all see the same.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy
import torch
from torch.nn import functional

__all__ = ["BYTES", "IGNORED", "MASK", "PADDING", "VOCABULARY", "Digits", "Text", "check_text"]

BYTES = 256
MASK = BYTES  # stands for a hidden token
PADDING = BYTES + 1  # fills a sequence up to the length of the longest
VOCABULARY = BYTES + 2
IGNORED = -100  # the target of positions that count nothing in the loss, as torch's cross_entropy has it

LIBRARY_BYTES = 4 << 20  # of the standard library's source text; the rest adds nothing but reading time
LEAST_TEXT_BYTES = 4096


class Digits:
    """The 1797 handwritten digits (UCI "Optical Recognition of Handwritten Digits"), 8 x 8, scaled up to ``pixels``."""

    classes = 10

    def __init__(self, pixels: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.as_tensor(digits.images, dtype=torch.float32)
        self._images = ((images - images.mean()) / images.std()).unsqueeze(1)
        self._labels = torch.as_tensor(digits.target, dtype=torch.long)
        self._order = torch.as_tensor(numpy.random.default_rng(seed).permutation(len(self._labels)))
        self._pixels = pixels

    def batch(self, rank: int, size: int, step: int, images: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (images, 1, pixels, pixels) and labels (images,): one stretch of a shuffled order per rank and step."""
        first = (step * size + rank) * images
        chosen = self._order[torch.arange(first, first + images) % len(self._order)]
        scaled = functional.interpolate(
            self._images[chosen], size=(self._pixels, self._pixels), mode="bilinear", align_corners=False
        )
        return scaled, self._labels[chosen]


class Text:
    """Text as bytes, with tokens hidden for a model to guess (Devlin et al., "BERT", 2018).

    ``file`` is any file; without one it is the source text of the Python standard library at hand.
    """

    def __init__(self, file: str | None, length: int, seed: int) -> None:
        self._text = numpy.fromfile(check_text(file), dtype=numpy.uint8) if file else _library_text()
        self._length = length
        self._seed = seed

    def batch(self, rank: int, step: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, attention mask and targets, each (sequences, length).

        Sequences begin anywhere and have unequal lengths, from half the longest on; 15 % of their tokens are to be
        guessed, of which 80 % are hidden, 10 % replaced by any byte and 10 % left as they are.
        """
        random = numpy.random.default_rng([self._seed, rank, step])
        tokens = numpy.full((sequences, self._length), PADDING, dtype=numpy.int64)
        targets = numpy.full_like(tokens, IGNORED)
        for row in range(sequences):
            length = int(random.integers(self._length // 2, self._length + 1))
            start = int(random.integers(0, len(self._text) - length + 1))
            text = self._text[start : start + length].astype(numpy.int64)
            guessed = random.random(length) < 0.15
            guessed[random.integers(length)] = True
            fate = random.random(length)
            targets[row, :length] = numpy.where(guessed, text, IGNORED)
            shown = numpy.where(guessed & (fate < 0.8), MASK, text)
            replaced = guessed & (fate >= 0.9)
            tokens[row, :length] = numpy.where(replaced, random.integers(0, BYTES, length), shown)
        tokens_, targets_ = torch.from_numpy(tokens), torch.from_numpy(targets)
        return tokens_, (tokens_ != PADDING).long(), targets_


def check_text(file: str) -> Path:
    """The file's path, if there is text enough in it.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is too short to train on.
    """
    path = Path(file)
    try:
        with path.open("rb") as stream:
            found = len(stream.read(LEAST_TEXT_BYTES))
    except OSError as error:
        raise ValueError(f"cannot read the text file '{file}': {error.strerror}") from None
    if found < LEAST_TEXT_BYTES:
        raise ValueError(
            f"the text file '{file}' holds {found} bytes: give one of at least {LEAST_TEXT_BYTES} bytes"
        )
    return path


def _library_text() -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return numpy.frombuffer(bytes(text[:LIBRARY_BYTES]), dtype=numpy.uint8)
