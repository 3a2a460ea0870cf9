"""Files that are hashed while they are written, and checked while they are read.

Hashing on the way costs one pass over the data instead of two, and what was checked is what was read: nobody can exchange
a file between the check and the use.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvd_ckpt.json_file import Wrong
from hvd_ckpt.names import one_line

__all__ = ["DAMAGED", "FileFacts", "HashedReader", "HashedWriter", "SnapshotError", "reading", "writing"]

DAMAGED = "use the snapshot before it, or restore it from a copy"
CHUNK = 1 << 20  # bytes hashed and written while they are in the CPU's cache


class SnapshotError(ValueError):
    """A snapshot cannot be written or read; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file: its size, and SHA-256 of its content in hexadecimal digits."""

    bytes: int
    sha256: str


class HashedWriter:
    """An open file to write to from its beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> None:
        """Writes bytes, or a one-dimensional buffer of bytes."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._hash.update(part)
            while part:  # a write to a raw file may be a partial one
                part = part[self._file.write(part) :]
        self._bytes += len(view)

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._bytes, self._hash.hexdigest())


@contextmanager
def writing(path: Path) -> Iterator[HashedWriter]:
    """A new file; its content is on the disk, not only on its way there, when the context is left without an error.

    Raises:
        OSError: it exists, or cannot be written.
    """
    with open(path, "xb", buffering=0) as file:
        yield HashedWriter(file)
        os.fsync(file.fileno())


class HashedReader:
    """An open file whose content is known to its size and hash."""

    def __init__(self, file: IO[bytes], facts: FileFacts) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._expected = facts
        self.left = facts.bytes

    def read(self, size: int) -> bytes:
        """The next bytes.

        Raises:
            Wrong: there are fewer.
        """
        if size > self.left:
            raise Wrong(f"it is cut off: {DAMAGED}")
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, view: memoryview) -> None:
        """Reads the next bytes into a buffer, all of it.

        Raises:
            Wrong: there are fewer.
        """
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            filled = 0
            while filled < len(part):
                count = self._file.readinto(part[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise Wrong(f"it became shorter while it was read: {DAMAGED}")
                filled += count
            self._hash.update(part)
        self.left -= len(view)

    def skip(self, size: int) -> None:
        """Reads the next bytes, which are only checked.

        Raises:
            Wrong: there are fewer.
        """
        rest = memoryview(bytearray(min(size, CHUNK)))
        for start in range(0, size, CHUNK):
            self.fill(rest[: size - start])

    def check(self) -> None:
        """To be called when all is read, and before any of it is used.

        Raises:
            Wrong: the content is not the one that was written.
        """
        if self._hash.hexdigest() != self._expected.sha256:
            raise Wrong(
                f"its content is not what was written (SHA-256 differs from the manifest's): {DAMAGED}"
            )


@contextmanager
def reading(folder: int, name: str, facts: FileFacts) -> Iterator[HashedReader]:
    """Opens a file for reading, if it is a regular file of the size that it should have.

    Args:
        folder: descriptor of its folder; no link leads out of it.

    Raises:
        Wrong: it is no regular file, or of another size.
        OSError: it cannot be opened.
    """
    with open_regular(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != facts.bytes:
            raise Wrong(f"it has {size} bytes, and the manifest says {facts.bytes}: {DAMAGED}")
        yield HashedReader(file, facts)


def open_regular(folder: int, name: str) -> IO[bytes]:
    """A regular file of a folder, open for reading; no link, no device, nothing that waits for a writer.

    Raises:
        Wrong: it is something else.
        OSError: it cannot be opened.
    """
    if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise Wrong(f"it is a link, a folder or a device: {DAMAGED}")
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    return open(descriptor, "rb", buffering=0)
