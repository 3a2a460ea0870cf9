"""Snapshots: the state of a training run as a folder that is there whole or not at all, and that nobody has to trust.

    RUN/snapshots/step-00000120/
        model.safetensors                         weights and buffers as rank 0 has them
        common.json      common.safetensors       all else that is the same on every rank
        rank-00000.json  rank-00000.safetensors   what is this rank's own, written by that rank; so for every rank
        manifest.json                             step, ranks, sizes and checksums: written last

A ``.json`` file holds a tree of plain values (:mod:`hvd_ckpt.training.tree`), the ``.safetensors`` file beside it its tensors.
Nothing in a snapshot is executed when it is loaded; every size, name, number and checksum is verified, and no link is followed.

Ranks write into ``.step-00000120.tmp-<token>``, which gets its name when all of it is on the disk. A snapshot of the same step that
is there already is ``.step-00000120.old-<token>`` for the moment between two renames, and counts as a snapshot if nothing follows.

Of all functions only :func:`write` is collective.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_ckpt.json_file import MAX_BYTES, Wrong, loads, shown
from hvd_ckpt.training.hashed_file import DAMAGED, SnapshotError, open_regular, reading
from hvd_ckpt.training.manifest import COMMON, MANIFEST, MODEL, Manifest, own_name, parse_manifest
from hvd_ckpt.training.random_state import random_state, set_random_state
from hvd_ckpt.training.snapshot_folder import SNAPSHOT, Warn, is_left_over, list_snapshots, names_in, remove
from hvd_ckpt.training.snapshot_parts import TOO_LARGE
from hvd_ckpt.training.snapshot_write import rank_and_size, write
from hvd_ckpt.training.tensor_file import read_tensors
from hvd_ckpt.training.tree import decode

__all__ = [
    "Snapshot",
    "SnapshotError",
    "find",
    "newest",
    "prune",
    "random_state",
    "read",
    "set_random_state",
    "write",
]


@dataclass(frozen=True)
class Snapshot:
    """What :func:`read` returns; all tensors are on the CPU.

    Attributes:
        step: training steps taken.
        ranks: number of ranks that wrote it.
        weights: for ``model.load_state_dict``; tied ones are the same tensor.
        common: what is the same on every rank.
        own: what is this rank's own; None if fewer ranks wrote the snapshot.
        manifest: its files, and when and by what they were written; None if it never was on the disk.
    """

    step: int
    ranks: int
    weights: dict[str, Tensor]
    common: Any
    own: Any
    manifest: Manifest | None


def read(path: Path, rank: int | None = None) -> Snapshot:
    """Reads a snapshot, and verifies the sizes of all its files and the content of those that it reads.

    Args:
        rank: whose own part to read: this process's by default. The other ranks' are not read.

    Raises:
        SnapshotError: there is none, or it is damaged, of another version, or not what :func:`write` writes.
    """
    path = Path(path)
    if rank is None:
        rank, _ = rank_and_size()
    with _opened(path) as (folder, manifest):

        def tensors(name: str) -> dict[str, Tensor]:
            with _naming(path, name), reading(folder, name, manifest.files[name]) as file:
                return read_tensors(file)

        def tree(name: str) -> Any:
            found = tensors(f"{name}.safetensors")
            facts = manifest.files[f"{name}.json"]
            with _naming(path, f"{name}.json"), reading(folder, f"{name}.json", facts) as file:
                if facts.bytes > MAX_BYTES:
                    raise Wrong(f"it {TOO_LARGE}")
                content = file.read(facts.bytes)
                file.check()
                return decode(loads(content, DAMAGED, DAMAGED), found)

        weights = tensors(MODEL)
        with _naming(path, MANIFEST):
            for alias, name in manifest.aliases.items():
                if alias in weights or name not in weights or name in manifest.aliases:
                    raise Wrong(f"the alias {shown(alias)} of {shown(name)} cannot be one: {DAMAGED}")
            weights.update({alias: weights[name] for alias, name in manifest.aliases.items()})
        own = tree(own_name(rank)) if rank < manifest.ranks else None
        return Snapshot(manifest.step, manifest.ranks, weights, tree(COMMON), own, manifest)


def find(folder: Path) -> Path | None:
    """The newest snapshot of which every file is as it was written; None if there are no snapshots.

    Warns of newer ones that are damaged. Reads all files of one snapshot.

    Raises:
        SnapshotError: there are snapshots, and all are damaged.
    """
    first: SnapshotError | None = None
    for path in list_snapshots(Path(folder)):
        try:
            _verify(path)
        except SnapshotError as error:
            warnings.warn(f"{str(error)[:-1]}. Looking for the one before.", stacklevel=2)
            first = first or error
        else:
            return path
    if first is not None:
        raise SnapshotError(f"None of the snapshots in '{folder}' can be used; of the newest: {first}")
    return None


def newest(folder: Path) -> Path | None:
    """The newest snapshot with a good manifest and all files at their sizes; None if there is none. Their content is not read."""
    return next((path for path in list_snapshots(Path(folder)) if _looks_whole(path)), None)


def prune(folder: Path, keep: int, warn: Warn | None = None) -> None:
    """Removes all snapshots older than the newest ``keep`` whole ones, and what interrupted writes have left. For one rank to call.

    What cannot be removed stays, with a warning. What this process is writing stays too.

    Args:
        warn: is told instead of Python's warnings.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"prune: keep is {keep}: keep 1 snapshot or more")
    folder = Path(folder)
    kept = 0
    for path in list_snapshots(folder):
        if kept == keep:
            remove(path, warn)
        else:
            kept += _looks_whole(path)
    standing = set(list_snapshots(folder))
    for name in names_in(folder):
        path = folder / name
        if path not in standing and is_left_over(path):
            remove(path, warn)


def _verify(path: Path) -> None:
    with _opened(path) as (folder, manifest):
        buffer = memoryview(bytearray(1 << 20))
        for name, facts in manifest.files.items():
            with _naming(path, name), reading(folder, name, facts) as file:
                while file.left:
                    file.fill(buffer[: file.left])
                file.check()


def _looks_whole(path: Path) -> bool:
    try:
        with _opened(path):
            return True
    except SnapshotError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, Manifest]]:
    """The descriptor of a snapshot's folder, and its manifest, when all files are there at their sizes and no others."""
    with _naming(path, ""):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with _naming(path, MANIFEST), open_regular(folder, MANIFEST) as file:
            manifest = parse_manifest(file.read(MAX_BYTES + 1))
            named = SNAPSHOT.fullmatch(path.name)
            if named and int(named[1]) != manifest.step:
                raise Wrong(f"it says step {manifest.step}: give the folder its name back")
        with _naming(path, ""):
            odd = set(os.listdir(folder)) ^ {*manifest.files, MANIFEST}
            if odd:
                raise Wrong(f"the file {shown(min(odd))} is missing or too many: {DAMAGED}")
        for name, facts in manifest.files.items():
            with _naming(path, name), reading(folder, name, facts):
                pass
        yield folder, manifest
    finally:
        os.close(folder)


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Turns what is wrong with a file of a snapshot into one sentence."""
    where = f"{name}: " if name else ""
    try:
        yield
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{error}.") from None
    except OSError as error:
        reason = f"{os.strerror(error.errno) if error.errno else error}: use another snapshot"
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{reason}.") from None
