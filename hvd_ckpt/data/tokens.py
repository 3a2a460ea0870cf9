"""Text as one long array of tokens, memory-mapped: its size is that of the disk, not of the memory."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from hvd_ckpt.data.text_files import find_text_files, library_files
from hvd_ckpt.data.token_cache import cache_folder, cache_key, obtain
from hvd_ckpt.names import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BYTES", "Tokens"]

BYTES = 256

# What special tokens are called in the vocabularies of BERT, RoBERTa, XLNet, GPT-2 and those made after them.
NAMES = {
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "padding": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "start": ("[CLS]", "<cls>", "<s>", "<|startoftext|>", "[BOS]", "<bos>"),
    "separator": ("[SEP]", "<sep>", "</s>", "<|endoftext|>", "[EOS]", "<eos>"),
}

MAX_BYTES = 256 << 20  # of a tokenizer
MOST_TOKENS = 1 << 24  # of a vocabulary

PIECE = 1 << 16  # characters (or more, up to the end of a line) that are tokenized as one
PIECES = 16  # tokenized at a time, in parallel
READ = 1 << 20  # bytes


class Tokens:
    """The tokens of text files, one after the other, with a separator between two files.

    A token is a byte (the default), or what a tokenizer makes of UTF-8 text, piece by piece of some 64 thousand
    characters that end with a line. One file as bytes is mapped as it is. Anything else is encoded once, into a file in
    ``cache`` that is found again as long as paths, sizes and times of change of the files and the content of the tokenizer are
    the same. Several processes may do so at once, and then each does all the work: on one machine, let one go first.

    Args:
        text: a text file or a folder of them, or several (see :func:`~.text_files.find_text_files`); without it the source
            text of the Python standard library.
        tokenizer: a JSON file of the ``tokenizers`` library; without it tokens are bytes.
        cache: a folder; without it ``$XDG_CACHE_HOME/hvd_ckpt/tokens`` or ``~/.cache/hvd_ckpt/tokens``.

    Attributes:
        array: all tokens, (tokens,), of an unsigned type; not to be written to.
        ordinary: tokens below this number are the tokenizer's own (or bytes).
        vocabulary: tokens below this number are all there are, special ones included.
        mask, padding, start, separator: the special tokens. They are the tokenizer's where it has them under one of
            their usual names ([MASK], <mask>, ...), and otherwise numbers above its own.

    Raises:
        ValueError: the text or the tokenizer is missing, unreadable, empty or none; one sentence.
    """

    def __init__(
        self,
        text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        files = library_files() if text is None else find_text_files(text)
        encoder, known = "bytes", None
        self.ordinary = BYTES
        if tokenizer is not None:
            known, encoder = _read_tokenizer(Path(tokenizer))
            self.ordinary = max(known.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            if self.ordinary > MOST_TOKENS:
                raise ValueError(
                    f"the tokenizer '{tokenizer}' numbers tokens up to {self.ordinary - 1}: no model has more than {MOST_TOKENS}"
                )
        self.vocabulary = self.ordinary
        self.mask, self.padding, self.start, self.separator = (
            self._find_special(known, names) for names in NAMES.values()
        )
        try:
            if known is None and len(files) == 1:
                self.array: NDArray[Any] = numpy.memmap(files[0], dtype=numpy.uint8, mode="r").view(
                    numpy.ndarray
                )
                return
            folder = cache_folder() if cache is None else Path(cache)
            path = folder / f"{cache_key(files, encoder)}.npy"
            least = sum(file.stat().st_size for file in files) * 2
        except OSError as error:
            raise ValueError(
                f"cannot read the text '{error.filename or files[0]}': {error.strerror}"
            ) from None
        dtype = numpy.dtype(numpy.uint16 if self.vocabulary <= 1 << 16 else numpy.uint32)
        least = least if known is None else least // 8  # a token stands for some bytes
        self.array = obtain(path, dtype, self._encode(files, known), least)
        if not len(self.array):
            raise ValueError(
                f"the text '{files[0]}' gives no tokens: it holds nothing that '{tokenizer}' knows"
            )

    def __len__(self) -> int:
        return len(self.array)

    def _find_special(self, known: Tokenizer | None, names: Sequence[str]) -> int:
        if known is not None:
            for name in names:
                token: int | None = known.token_to_id(name)
                if token is not None:
                    return token
        self.vocabulary += 1
        return self.vocabulary - 1

    def _encode(self, files: Sequence[Path], tokenizer: Tokenizer | None) -> Iterator[NDArray[Any]]:
        for at, file in enumerate(files):
            if at:
                yield numpy.array([self.separator])
            try:
                yield from _bytes(file) if tokenizer is None else _encode_text(file, tokenizer)
            except OSError as error:
                raise ValueError(f"cannot read the text file '{file}': {error.strerror}") from None


def _read_tokenizer(path: Path) -> tuple[Tokenizer, str]:
    """The tokenizer in a file, and a name for its content."""
    from tokenizers import Tokenizer

    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            raise ValueError(
                f"the tokenizer '{path}' is no file, or larger than {MAX_BYTES >> 20} MiB: name another"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer '{path}': {error.strerror}") from None
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more special
        reason = str(error).splitlines()[0][:200] if str(error) else "unknown content"
        raise ValueError(
            f"'{path}' is no JSON file of the tokenizers library (a Hugging Face tokenizer.json): {reason}"
        ) from None
    # A file may ask for these for the batches of a model; text is encoded whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(content).hexdigest()


def _bytes(file: Path) -> Iterator[NDArray[Any]]:
    with file.open("rb") as stream:
        while piece := stream.read(READ):
            yield numpy.frombuffer(piece, dtype=numpy.uint8)


def _encode_text(file: Path, tokenizer: Tokenizer) -> Iterator[NDArray[Any]]:
    pieces: list[str] = []
    for piece in _pieces(file):
        pieces.append(piece)
        if len(pieces) == PIECES:
            yield _ids(tokenizer, pieces)
            pieces = []
    if pieces:
        yield _ids(tokenizer, pieces)


def _pieces(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            # A line is cut where it is much longer than a piece, so that a file without line ends fits as well.
            while piece := stream.read(PIECE):
                yield piece + stream.readline(PIECE)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text file '{file}' is no UTF-8 ({error.reason}), which a tokenizer needs: "
            "convert it, or train on bytes without a tokenizer"
        ) from None


def _ids(tokenizer: Tokenizer, pieces: list[str]) -> NDArray[Any]:
    try:
        encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"the tokenizer cannot encode the text: {one_line(str(error))}") from None
    return numpy.concatenate([numpy.array(one.ids, dtype=numpy.uint32) for one in encoded])
