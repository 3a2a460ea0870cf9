"""Which files a text consists of."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SUFFIXES", "find_text_files", "library_files"]

SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".raw", ".tokens",
    ".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".f90", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".kt", ".lua", ".pl",
    ".r", ".rb", ".rs", ".scala", ".sh", ".swift", ".ts",
})  # fmt: skip


def find_text_files(text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of a text, in order.

    A file is taken whatever its name. Of a folder, all files below it are that have a suffix in ``SUFFIXES`` (in upper
    or lower case) and are not empty, sorted by path; hidden files and folders and symbolic links below it are passed over.

    Args:
        text: a file or a folder, or several, which follow one another.

    Raises:
        ValueError: there is none, or no text in it; one sentence.
    """
    sources = [text] if isinstance(text, (str, os.PathLike)) else text
    if not sources:
        raise ValueError("no text file is named: name one, or a folder")
    return [file for source in sources for file in _files_of(Path(source))]


def library_files() -> list[Path]:
    """The modules of the Python standard library at hand: text that is on every machine."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def _files_of(source: Path) -> list[Path]:
    try:
        if source.is_dir():
            found = [path for path in _walk(source) if path.stat().st_size]
            if not found:
                raise ValueError(
                    f"the folder '{source}' holds no text: files in it need a suffix such as .txt, .md or .py"
                )
            return found
        size = source.stat().st_size
    except OSError as error:
        raise ValueError(f"cannot read the text '{source}': {error.strerror}") from None
    if not source.is_file():
        raise ValueError(f"the text '{source}' is neither a file nor a folder")
    if not size:
        raise ValueError(f"the text file '{source}' is empty")
    return [source]


def _walk(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix.lower() not in SUFFIXES or path.is_symlink():
                continue
            if path.is_file():
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
