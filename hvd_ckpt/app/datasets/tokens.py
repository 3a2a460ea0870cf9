"""Text as one array of tokens, which is memory-mapped, so that the disk limits its size and not the memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from hvd_ckpt.utils import folders
from hvd_ckpt.utils.plain_data import write_bytes
from hvd_ckpt.utils.text import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".raw", ".tokens",
    ".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".f90", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".kt", ".lua", ".pl",
    ".r", ".rb", ".rs", ".scala", ".sh", ".swift", ".ts",
})  # fmt: skip

# Names of special tokens in the vocabularies of BERT, RoBERTa, XLNet, GPT-2 and models after them.
SPECIAL = {
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "padding": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "start": ("[CLS]", "<cls>", "<s>", "<|startoftext|>", "[BOS]", "<bos>"),
    "separator": ("[SEP]", "<sep>", "</s>", "<|endoftext|>", "[EOS]", "<eos>"),
}
MOST_TOKENS = 1 << 24  # largest vocabulary
LARGEST_TOKENIZER = 1 << 30  # bytes

VERSION = 3  # of the encoding and the format of the cache; to be raised when one changes, so that old files are not used
JSON_LINES = frozenset({".jsonl", ".ndjson"})
PIECE = 1 << 16  # characters that are tokenized as one text, extended to the end of a line
PIECES = 16  # pieces that are tokenized at a time, in parallel
READ = 1 << 20  # bytes that are read at a time


class Tokens:
    """The tokens of concatenated text files, with a separator between two files.

    A token is a byte (the default) or a token of a tokenizer. A tokenizer encodes UTF-8 text in pieces of about 64 thousand
    characters up to the end of a line. A single file as bytes is mapped as it is. Otherwise, the text is encoded once into a file
    in ``cache``. The file is reused while the paths, sizes and modification times of the files and the content of the tokenizer
    are unchanged. Several processes may encode at once, but then each of them does all the work. On one machine, let one process
    go first.

    Args:
        text: a text file or a folder of text files (see :func:`find_text_files`); by default the source text of the Python standard
            library.
        tokenizer: a JSON file of the ``tokenizers`` library; without it, tokens are bytes.
        documents: one of :data:`hvd_ckpt.utils.text.DOCUMENTS`. Each nonblank line of UTF-8 text is a document (``lines``), or a
            JSON object whose "text" is a document (``jsonl``). Each document is tokenized by itself and followed by a separator.
        cache: a folder; by default ``$XDG_CACHE_HOME/hvd_ckpt/tokens`` or ``~/.cache/hvd_ckpt/tokens``.

    Attributes:
        array: all tokens, (tokens,), of an unsigned type; read-only.
        ordinary: number of tokens of the tokenizer, or of bytes. Ordinary tokens are below this number.
        vocabulary: number of tokens, including special tokens.
        mask, padding, start, separator: the special tokens. If the tokenizer has one under a usual name ([MASK], <mask>, ...), it
            is that token. Otherwise, it is a number above the tokens of the tokenizer.
        boundary: the separator, if it ends documents; else None.

    Raises:
        ValueError: the text or the tokenizer is missing, unreadable, empty or invalid. The message is one sentence.
    """

    def __init__(
        self,
        text: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        documents: str | None = None,
    ) -> None:
        suffixes = JSON_LINES if documents == "jsonl" else SUFFIXES
        # By default the modules of the standard library, a text that every machine has.
        library = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
        files = sorted(library) if text is None else find_text_files(text, suffixes)
        encoder, known = "bytes", None
        kind: numpy.dtype[Any]
        self.ordinary = BYTES
        if tokenizer is not None:
            known, encoder = read_tokenizer(Path(tokenizer))
            self.ordinary = number_of_tokens(known, tokenizer)
        self._number_special(known)
        if documents is not None:
            self.boundary = self.separator
            encoder += f" {documents}"
        path = files[0]
        try:
            if known is None and len(files) == 1 and documents is None:
                kind = numpy.dtype(numpy.uint8)
            else:
                kind = numpy.dtype(numpy.uint16 if self.vocabulary <= 1 << 16 else numpy.uint32)
                path = (cache_folder() if cache is None else Path(cache)) / f"{key_of(files, encoder)}.tokens"
                if not path.is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if known is None and documents is None:
                        size = sum(file.stat().st_size for file in files) + len(files) - 1  # with separators
                        _check_room(path.parent, size * kind.itemsize)
                    arrays = self._encode(files, known, documents)
                    # Several processes may write it at once.
                    write_bytes((numpy.ascontiguousarray(array, kind).data for array in arrays), path)
            if not path.stat().st_size:
                raise ValueError(f"the text '{files[0]}' gives no tokens")
            # A plain array over the map: each result of indexing a memmap would be one, too, which takes longer to make.
            self.array: NDArray[Any] = numpy.memmap(path, dtype=kind, mode="r").view(numpy.ndarray)
        except OSError as error:
            if error.strerror is None:  # a sentence
                raise ValueError(str(error)) from None
            raise ValueError(f"cannot use '{error.filename or path}': {error.strerror}") from None

    boundary: int | None = None

    def __len__(self) -> int:
        return len(self.array)

    def _number_special(self, known: Tokenizer | None) -> None:
        numbers = [number for _, number in special_tokens(known, self.ordinary).values()]
        self.mask, self.padding, self.start, self.separator = numbers
        self.vocabulary = max(self.ordinary, *(number + 1 for number in numbers))

    def _encode(
        self, files: Sequence[Path], tokenizer: Tokenizer | None, documents: str | None
    ) -> Iterator[NDArray[Any]]:
        # A separator between two files, or after each document: never both.
        separator = numpy.array([self.separator])
        for at, file in enumerate(files):
            if documents is None and at:
                yield separator
            if documents is None and tokenizer is None:
                yield from _bytes(file)
                continue
            texts = _pieces(file) if documents is None else _documents(file, documents)
            while some := list(islice(texts, PIECES)):
                for tokens in _encode_texts(some, tokenizer):
                    yield tokens
                    if documents is not None and len(tokens):
                        yield separator


def find_text_files(text: str | os.PathLike[str], suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """The files of a text, in order.

    A file may have any name. In a folder, the text consists of all files at any depth that have one of the ``suffixes`` (in upper
    or lower case) and are not empty, sorted by path. Hidden files and folders and symbolic links are left out.

    Raises:
        ValueError: the file is missing, unreadable or empty, or the folder has no text. The message is one sentence.
    """
    source = Path(text)
    try:
        if not source.is_dir():
            if not source.stat().st_size:
                what = "file '{}' is empty" if source.is_file() else "'{}' is neither a file nor a folder"
                raise ValueError(f"the text {what.format(source)}")
            return [source]
        named = [path for path in visible_files(source) if path.suffix.lower() in suffixes]
        files = [path for path in named if path.is_file() and not path.is_symlink() and path.stat().st_size]
    except OSError as error:
        raise ValueError(f"cannot read the text '{error.filename}': {error.strerror}") from None
    if not files:
        some = ".txt, .md or .py" if suffixes is SUFFIXES else " or ".join(sorted(suffixes))
        raise ValueError(f"the folder '{source}' holds no text: files in it need a suffix such as {some}")
    return files


def visible_files(folder: Path) -> list[Path]:
    """The files at any depth, sorted by path, without hidden ones and those in hidden folders.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for parent, below, inside in os.walk(folder, onerror=fail):
        below[:] = [name for name in below if not name.startswith(".")]
        files += [Path(parent, name) for name in inside if not name.startswith(".")]
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def cache_folder() -> Path:
    return folders.cache_folder() / "tokens"


def key_of(files: Sequence[Path], encoder: str) -> str:
    """The name of a cache file: a hash of the encoder and of paths, sizes and modification times of the text files."""
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([VERSION, encoder, about]).encode()).hexdigest()[:32]


def _check_room(folder: Path, needed: int) -> None:
    """Raises ValueError if a folder has no room for so many bytes: a sparse file of any size fits on a small disk."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the tokens of the text take {needed:,} bytes in '{folder}', where {free:,} are free: make room, or give less text"
        )


def read_tokenizer(path: Path) -> tuple[Tokenizer, str]:
    """The tokenizer in a file, and a hash of its content."""
    from tokenizers import Tokenizer

    try:
        if path.is_file() and path.stat().st_size > LARGEST_TOKENIZER:
            raise ValueError(
                f"'{path}' has {path.stat().st_size:,} bytes, and a tokenizer has at most {LARGEST_TOKENIZER:,}"
            )
        content = path.read_bytes() if path.is_file() or not path.exists() else b""
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer '{path}': {error.strerror}") from None
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(
            f"'{path}' is not a JSON file of the tokenizers library (a Hugging Face tokenizer.json): {one_line(str(error))}"
        ) from None
    # A file may set these for the batches of a model, but the text is encoded as a whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(content).hexdigest()


def number_of_tokens(tokenizer: Tokenizer, name: str | os.PathLike[str]) -> int:
    """The highest token of a tokenizer, whose file is ``name``, plus one.

    Raises:
        ValueError: the number is above :data:`MOST_TOKENS`.
    """
    highest: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= MOST_TOKENS:
        raise ValueError(f"tokenizer '{name}': it has token {highest}, above {MOST_TOKENS}")
    return highest + 1


def special_tokens(tokenizer: Tokenizer | None, ordinary: int) -> dict[str, tuple[str, int]]:
    """Name and number of each of the :data:`SPECIAL` tokens. Those that the tokenizer lacks have numbers from ``ordinary`` on."""
    found, following = {}, count(ordinary)
    for kind, names in SPECIAL.items():
        known: list[Any] = (
            [(name, tokenizer.token_to_id(name)) for name in names] if tokenizer is not None else []
        )
        there = next((pair for pair in known if pair[1] is not None), None)
        found[kind] = there or (names[0], next(following))
    return found


def _bytes(file: Path) -> Iterator[NDArray[Any]]:
    with file.open("rb") as stream:
        while piece := stream.read(READ):
            yield numpy.frombuffer(piece, dtype=numpy.uint8)


def _encode_texts(texts: list[str], tokenizer: Tokenizer | None) -> list[NDArray[Any]]:
    if tokenizer is None:
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]
    try:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"the tokenizer cannot encode the text: {one_line(str(error))}") from None
    return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in encoded]


def _documents(file: Path, form: str) -> Iterator[str]:
    """The documents of a file, one for each line. Half a surrogate pair becomes a question mark."""
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    text = line.rstrip("\n") if form == "lines" else _text_of(line, file, number)
                    yield text.encode("utf-8", "replace").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text file '{file}' is not UTF-8 ({error.reason}): convert it") from None


def _text_of(line: str, file: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"line {number} of '{file}' is not a JSON object with a string \"text\"")
    return text


def _pieces(file: Path) -> Iterator[str]:
    try:
        # Line ends stay as they are in the file, so the tokens do not depend on the platform.
        with file.open(encoding="utf-8", newline="") as stream:
            # A line that is much longer than a piece is cut, for files without line ends.
            while piece := stream.read(PIECE):
                yield piece + stream.readline(PIECE)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text file '{file}' is not UTF-8 ({error.reason}), which a tokenizer needs: "
            "convert it, or train on bytes without a tokenizer"
        ) from None
