"""The files of a snapshot, open for reading: every size is verified first, and the content of each as it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_ckpt.json_file import MAX_BYTES, Wrong, loads, shown
from hvd_ckpt.snapshots.hashed_file import DAMAGED, HashedReader, SnapshotError, open_regular, reading
from hvd_ckpt.snapshots.manifest import MANIFEST, Manifest, parse_manifest
from hvd_ckpt.snapshots.snapshot_folder import SNAPSHOT
from hvd_ckpt.snapshots.snapshot_parts import TOO_LARGE
from hvd_ckpt.snapshots.tensor_file import Cut, read_tensors
from hvd_ckpt.snapshots.tree import decode

__all__ = ["SnapshotFiles", "naming", "opened"]


@dataclass(frozen=True)
class SnapshotFiles:
    """What :func:`opened` gives; what its methods raise is a SnapshotError that names the snapshot and the file.

    Attributes:
        path: the snapshot's.
        folder: descriptor of it; no link leads out of it.
        manifest: what it says.
    """

    path: Path
    folder: int
    manifest: Manifest

    @contextmanager
    def reading(self, name: str) -> Iterator[HashedReader]:
        """One of its files; what is read has to be checked."""
        with naming(self.path, name), reading(self.folder, name, self.manifest.files[name]) as file:
            yield file

    def tensors(self, name: str, cut: Cut | None = None) -> dict[str, Tensor]:
        """Those of a file, or what ``cut`` leaves of them."""
        with self.reading(name) as file:
            return read_tensors(file, cut)

    def document(self, name: str) -> Any:
        """The JSON of a tree."""
        with self.reading(f"{name}.json") as file:
            if file.left > MAX_BYTES:
                raise Wrong(f"it {TOO_LARGE}")
            content = file.read(file.left)
            file.check()
            return loads(content, DAMAGED, DAMAGED)

    def tree(self, name: str, cut: Callable[[Any], Cut] | None = None) -> Any:
        """A tree.

        Args:
            cut: takes its JSON, and gives what is to be left of its tensors.
        """
        document = self.document(name)
        with naming(self.path, f"{name}.json"):
            left = None if cut is None else cut(document)
        found = self.tensors(f"{name}.safetensors", left)
        with naming(self.path, f"{name}.json"):
            return decode(document, found)


@contextmanager
def opened(path: Path) -> Iterator[SnapshotFiles]:
    """The files of a snapshot, when all are there at their sizes and no others.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
    """
    with naming(path, ""):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with naming(path, MANIFEST), open_regular(folder, MANIFEST) as file:
            manifest = parse_manifest(file.read(MAX_BYTES + 1))
            named = SNAPSHOT.fullmatch(path.name)
            if named and int(named[1]) != manifest.step:
                raise Wrong(f"it says step {manifest.step}: give the folder its name back")
        with naming(path, ""):
            odd = set(os.listdir(folder)) ^ {*manifest.files, MANIFEST}
            if odd:
                raise Wrong(f"the file {shown(min(odd))} is missing or too many: {DAMAGED}")
        for name, facts in manifest.files.items():
            with naming(path, name), reading(folder, name, facts):
                pass
        yield SnapshotFiles(path, folder, manifest)
    finally:
        os.close(folder)


@contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Turns what is wrong with a file of a snapshot into one sentence."""
    where = f"{name}: " if name else ""
    try:
        yield
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{error}.") from None
    except OSError as error:
        reason = f"{os.strerror(error.errno) if error.errno else error}: use another snapshot"
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{reason}.") from None
