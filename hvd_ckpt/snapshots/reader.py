"""Reading of snapshots by one process or by each rank of a job, and the search for the newest.

On many ranks, the first rank finds a snapshot, and sends it with its manifest to the others. Each rank reads only its own plain
values, and the files with elements that it wants, since n ranks would otherwise read n files each.

Nothing in a snapshot is executed when it is loaded; every name, size and hash is verified, and no link is followed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.content import SavedState
from hvd_ckpt.snapshots.folder import (
    SNAPSHOT,
    SnapshotError,
    Warn,
    is_left_over,
    list_snapshots,
    names_in,
    remove,
)
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    OTHER_MODEL,
    REPLICATED,
    Layout,
    Manifest,
    Range,
    libraries,
    rank_file,
    tensors_file,
)
from hvd_ckpt.snapshots.tensors import TensorFile, hash_file, load_state, map_tensors
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.schema import Wrong, shown

Read = Callable[[str, int, int], Tensor]
FIT = "give the model, optimizer and settings that it was written with, or another snapshot"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot with a valid manifest. Its files are read, and verified by size and hash, when they are used. All methods raise
    SnapshotError if one is damaged, or no longer there.

    Args:
        path: its folder.
        known: hash, and what ``os.stat()`` said, of the files that were verified, also by the rank that has found it: one that is
            the same here is not read once more.
    """

    path: Path
    manifest: Manifest
    known: set[tuple[object, ...]] = field(default_factory=set)

    @cached_property
    def replicated(self) -> Any:
        """Plain values that are the same on every rank."""
        return self.state(REPLICATED)

    @property
    def has_own(self) -> bool:
        """Whether the snapshot has plain values of this process's rank: as many ranks wrote it, or more."""
        return current().replica < self.manifest.replicas

    @cached_property
    def per_rank(self) -> Any:
        """The plain values of this process's rank, or None."""
        return self.state(rank_file(self.number_of(current().replica))) if self.has_own else None

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """For ``model.load_state_dict``, whole; tied ones are the same tensor."""
        weights = self.whole_tensors("weights")
        return {**weights, **{alias: weights[name] for alias, name in self.manifest.aliases.items()}}

    def number_of(self, rank: int) -> int:
        """The process of a rank there, on this process's stage and part if there were as many, else on the first."""
        grid, layout = current(), self.manifest.layout
        stage = grid.stage if grid.stages == layout.pipeline_stages else 0
        part = grid.part if grid.tensor == layout.tensor else 0
        return (stage * self.manifest.replicas + rank) * layout.tensor + part

    @property
    def own_buffers(self) -> str:
        """The kind of the buffers that this rank has saved for itself; an empty text if there were other ranks."""
        grid, manifest = current(), self.manifest
        number = self.number_of(grid.replica) % (manifest.replicas * manifest.layout.tensor)
        return f"buffers@{number}" if manifest.replicas == grid.replicas else ""

    def comparing(self) -> AbstractContextManager[None]:
        """A context in which the snapshot is a SnapshotError of one sentence, if it does not fit, or is damaged."""
        return naming(self.path, way_out=FIT)

    def state(self, name: str) -> Any:
        """The plain values in a file."""
        path = self.verified(name)
        with naming(self.path, name):
            return load_state(path)

    def whole_tensors(self, kind: str) -> dict[str, Tensor]:
        """All tensors of a kind, whole, by the names of parameters and buffers."""
        named = self.manifest.names(kind)
        values = zip(named.items(), self.read([self.manifest.all_of(name) for name in named.values()]))
        return {name: self.manifest.tensors[stored].unflatten(flat) for (name, stored), flat in values}

    def read(self, wanted: Iterable[Range]) -> Iterator[Tensor]:
        """The values of these elements, 1-D, in the dtypes that they were saved in, on any layout of ranks.

        Only the files of ranks that have some of them are read. All of these are verified before this returns; values are then read
        one at a time. They may be mapped from a file, not to be changed. Raises Wrong if there is no such tensor, or it has another
        size.
        """
        found = []
        for each in wanted:
            there = self.manifest.tensors.get(each.name)
            if there is None:
                raise Wrong(f"it has no {shown(each.name)}: {OTHER_MODEL}")
            if there.size != each.whole.size:
                raise Wrong(
                    f"{shown(each.name)} has size {list(there.size)}, and must have {list(each.whole.size)}: {OTHER_MODEL}"
                )
            moved = (there.stride, there.cut) != (each.whole.stride, each.whole.cut)
            start, stop = (0, there.numel) if moved else (each.start, each.stop)
            overlaps = [
                (rank, max(start, first) - first, min(stop, last) - first)
                for first, last, rank in self.manifest.by_tensor.get(each.name, ())
                if first < stop and start < last
            ]
            found.append((each, there, moved, overlaps))
        ranks = {rank for *_, overlaps in found for rank, *_ in overlaps}
        files = {rank: self.open_file(rank) for rank in sorted(ranks)}

        def values() -> Iterator[Tensor]:
            for each, there, moved, overlaps in found:
                # Ranges are in order, without gap or overlap, so what is wanted of each follows on the one before.
                parts = (files[rank](each.name, start, stop) for rank, start, stop in overlaps)
                if len(overlaps) == 1:
                    flat = next(parts)
                else:
                    sizes = [stop - start for _, start, stop in overlaps]
                    flat = torch.empty(sum(sizes), dtype=there.torch_dtype)
                    for part, place in zip(parts, torch.split(flat, sizes)):
                        place.copy_(part)
                yield each.whole.flatten(there.unflatten(flat))[each.start : each.stop] if moved else flat

        return values()

    def open_file(self, rank: int) -> Read:
        """Verifies the file of a rank's ranges. The function reads elements of one: tensor, first and last + 1 element there."""
        name, ranges = tensors_file(rank), self.manifest.ranges[rank]
        path = self.verified(name)
        with naming(self.path, name):
            file = TensorFile(path)
            if file.names() != ranges.keys():
                raise Wrong(f"it has other tensors than the manifest says: {DAMAGED}")
            for tensor, (start, stop) in ranges.items():
                if file.form(tensor) != ([stop - start], self.manifest.tensors[tensor].torch_dtype):
                    raise Wrong(f"{shown(tensor)} is not what the manifest says: {DAMAGED}")
        return file.read

    def verified(self, name: str) -> Path:
        """The path of a file whose content has the size and hash that the manifest says."""
        path, entry, memory = self.path / name, self.manifest.files[name], psutil.virtual_memory().total
        with naming(self.path, name):
            status = _check_size(path, entry.bytes)
            # Before the file is read: a sparse file of any size fits on a small disk. Tensors, which are read one at a time, may be
            # more than there is memory, as offloaded state is.
            on_disk = 0 if path.suffix == ".pt" else status.st_blocks * 512
            if entry.bytes > max(memory, on_disk):
                raise Wrong(
                    f"its {entry.bytes >> 20} MiB are more than the {memory >> 20} MiB of memory here: {DAMAGED}"
                )
            seen = (entry.sha256, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
            # Within the clock's resolution, a change may leave no trace.
            is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > 2_000_000_000
            if seen not in self.known and hash_file(path) != entry:
                raise Wrong(
                    f"its content is not what was written (SHA-256 differs from the manifest's): {DAMAGED}"
                )
        if is_settled:
            self.known.add(seen)
        return path


@dataclass(frozen=True)
class HeldSnapshot(Snapshot):
    """A snapshot that was never on the disk, of which no rank resumes with plain values of its own."""

    held: Any = None  # copies of all values, whole tensors by name
    has_own = False

    @classmethod
    def of(cls, step: int, state: SavedState) -> HeldSnapshot:
        """Of what a rank has by itself."""
        manifest = Manifest.model_construct(
            step=step,
            ranks=current().replicas,
            libraries=libraries(),
            layout=Layout(),
            ranges=({each.name: (each.start, each.stop) for each in state.ranges},),
            tensors={each.name: each.whole for each in state.ranges},
            aliases=dict(state.aliases),
        )
        values = {each.name: each.values for each in state.ranges}
        held = {"tensors": values, REPLICATED: state.replicated, "per_rank": state.per_rank}
        copied = map_tensors(held, "state", lambda tensor: tensor.detach().to("cpu", copy=True))
        return cls(Path("in memory"), manifest, held=copied)

    def state(self, name: str) -> Any:
        """A copy: an optimizer keeps the tensors that it loads, and would change those here."""
        state = self.held[REPLICATED if name == REPLICATED else "per_rank"]
        return map_tensors(state, "state", torch.clone)

    def open_file(self, rank: int) -> Read:
        """Reads of the tensors here."""
        return lambda tensor, start, stop: self.held["tensors"][tensor][start:stop]


def open_snapshot(path: Path) -> Snapshot:
    """A snapshot, if all files are there at their sizes and no others; their content is not verified yet. Raises SnapshotError if
    there is no snapshot, or it is damaged."""
    with naming(path):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        names = set(os.listdir(path))
    with naming(path, MANIFEST):
        _check_size(path / MANIFEST)
        with open(path / MANIFEST, "rb") as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1))
        named = SNAPSHOT.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise Wrong(f"it says step {manifest.step}: give the folder its name back")
    with naming(path):
        if odd := names ^ {*manifest.files, MANIFEST}:
            raise Wrong(f"the file {shown(min(odd))} is missing or unknown: {DAMAGED}")
    for name, entry in manifest.files.items():
        with naming(path, name):
            _check_size(path / name, entry.bytes)
    return Snapshot(path, manifest)


def _check_size(path: Path, size: int | None = None) -> os.stat_result:
    """What the file system says of a file; raises Wrong if it is something else, or has another size."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Wrong(f"it is a link, a folder or a device: {DAMAGED}")
    if size not in (None, status.st_size):
        raise Wrong(f"it has {status.st_size} bytes, and the manifest says {size}: {DAMAGED}")
    return status


@contextmanager
def naming(path: Path, name: str = "", way_out: str = "") -> Iterator[None]:
    """Turns an error in a snapshot, or in a file of it, into one sentence, a SnapshotError; ``way_out``: what to do unless the
    snapshot is damaged, where errors do not say it."""
    where = f"{name}: " if name else ""
    try:
        yield
    except Wrong as error:
        more = f": {way_out}" if way_out and DAMAGED not in str(error) else ""
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{error}{more}.") from None
    except OSError as error:
        reason = f"{os.strerror(error.errno) if error.errno else error}: use another snapshot"
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{reason}.") from None


def find(folder: Path) -> Snapshot | None:
    """The newest snapshot of which every file is as it was written; None if there are no snapshots. Reads all files of one
    snapshot. Warns of newer ones that are damaged, and raises SnapshotError if all are."""
    errors: list[SnapshotError] = []
    for path in list_snapshots(folder):
        try:
            snapshot = open_snapshot(path)
            for name in snapshot.manifest.files:
                snapshot.verified(name)
            return snapshot
        except SnapshotError as error:
            run_warnings.warn(f"{str(error)[:-1]}. Looking for the one before.")
            errors.append(error)
    if errors:
        raise SnapshotError(f"None of the snapshots in '{folder}' can be used; of the newest: {errors[0]}")
    return None


def find_in(path: Path) -> Snapshot | None:
    """The snapshot in this folder, or the newest good one of the run in it, or None."""
    with naming(path):
        is_one = (path / MANIFEST).is_file()
    return open_snapshot(path) if is_one else find(path / "snapshots")


def prune(folder: Path, keep: int, warn: Warn) -> None:
    """Removes snapshots older than the newest ``keep`` complete ones, and what interrupted writes have left. For one rank to call,
    while no snapshot is being written. Warns of each folder that cannot be removed, and stays."""
    complete, kept, old = 0, set(), []
    for path in list_snapshots(folder):
        if complete == keep:
            old.append(path)
            continue
        kept.add(path)
        # A damaged snapshot does not count: ``keep`` good ones stay, and with them the damaged ones in between.
        with suppress(SnapshotError):
            open_snapshot(path)
            complete += 1
    remove(old, warn)
    left_over = (folder / name for name in names_in(folder) if is_left_over(name))
    remove([path for path in left_over if path not in kept], warn)
