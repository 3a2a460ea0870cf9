"""Snapshots: the state of a training run as a folder that is there whole or not at all, and that nobody has to trust.

    RUN/snapshots/step-00000120/
        model.safetensors                         weights and buffers as rank 0 has them
        common.json      common.safetensors       all else that is the same on every rank
        rank-00000.json  rank-00000.safetensors   what is this rank's own, written by that rank; so for every rank
        shard-00000.json  shard-00000.safetensors where state is split over the ranks: this rank's part of the optimizer's
        weights-00000.safetensors                 where weights are split, too: this rank's, by the parameters' names
        manifest.json                             step, ranks, parts, sizes and checksums: written last

A ``.json`` file holds a tree of plain values (:mod:`hvd_ckpt.snapshots.tree`), the ``.safetensors`` file beside it its tensors.
Nothing in a snapshot is executed when it is loaded; every size, name, number and checksum is verified, and no link is followed.

Ranks write into ``.step-00000120.tmp-<token>``, which gets its name when all of it is on the disk. A snapshot of the same step that
is there already is ``.step-00000120.old-<token>`` for the moment between two renames, and counts as a snapshot if nothing follows.

Of all functions only :func:`write` is collective.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.snapshots.hashed_file import DAMAGED, SnapshotError
from hvd_ckpt.snapshots.manifest import COMMON, MANIFEST, MODEL, Manifest, own_name, weights_name
from hvd_ckpt.snapshots.random_state import random_state, set_random_state
from hvd_ckpt.snapshots.shards import Shards
from hvd_ckpt.snapshots.snapshot_files import SnapshotFiles, naming, opened
from hvd_ckpt.snapshots.snapshot_folder import Warn, is_left_over, list_snapshots, names_in, remove
from hvd_ckpt.snapshots.snapshot_write import rank_and_size, write

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
        path: where it is; None if it never was on the disk.
    """

    step: int
    ranks: int
    weights: dict[str, Tensor]
    common: Any
    own: Any
    manifest: Manifest | None
    path: Path | None = None

    @property
    def shards(self) -> Shards | None:
        """Which rank had which part of what was split over the ranks; None if nothing was."""
        return None if self.manifest is None else self.manifest.shards


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
    with opened(path) as files:
        manifest = files.manifest
        weights = files.tensors(MODEL)
        if manifest.shards is not None and manifest.shards.weights is not None:
            weights.update(_whole_weights(files, manifest.shards))
        with naming(path, MANIFEST):
            for alias, name in manifest.aliases.items():
                if alias in weights or name not in weights or name in manifest.aliases:
                    raise Wrong(f"the alias {shown(alias)} of {shown(name)} cannot be one: {DAMAGED}")
            weights.update({alias: weights[name] for alias, name in manifest.aliases.items()})
        own = files.tree(own_name(rank)) if rank < manifest.ranks else None
        return Snapshot(manifest.step, manifest.ranks, weights, files.tree(COMMON), own, manifest, path)


def _whole_weights(files: SnapshotFiles, shards: Shards) -> dict[str, Tensor]:
    """The parameters of which each rank has written a part."""
    assert shards.weights is not None
    dtypes = {name: getattr(torch, whole.dtype) for name, whole in shards.parameters.items()}
    flats: dict[str, Tensor] = {}
    for rank, ranges in enumerate(shards.weights):
        name = weights_name(rank)
        pieces = files.tensors(name)
        with naming(files.path, name):
            if set(pieces) != {parameter for parameter, _, _ in ranges}:
                raise Wrong(f"it has other parameters than the manifest says: {DAMAGED}")
            for parameter, start, stop in ranges:
                piece = pieces.pop(parameter)
                if piece.dtype != dtypes[parameter] or piece.shape != (stop - start,):
                    raise Wrong(f"{shown(parameter)} is not what the manifest says: {DAMAGED}")
                if parameter not in flats:
                    flats[parameter] = torch.empty(shards.parameters[parameter].numel, dtype=piece.dtype)
                flats[parameter][start:stop] = piece
    empty = {name: torch.empty(0, dtype=dtype) for name, dtype in dtypes.items()}
    return {name: whole.unflatten(flats.get(name, empty[name])) for name, whole in shards.parameters.items()}


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
    with opened(path) as files:
        for name in files.manifest.files:
            with files.reading(name) as file:
                file.skip(file.left)
                file.check()


def _looks_whole(path: Path) -> bool:
    try:
        with opened(path):
            return True
    except SnapshotError:
        return False
