"""Reading of snapshots by one process or by each rank of a job, and the search for the newest.

On many ranks, the first rank finds a snapshot, and sends it with its manifest to the others. Each rank reads only its own plain
values, and the files with elements that it wants, since n ranks would otherwise read n files each.

Nothing in a snapshot is executed when it is loaded; every name, size and hash is verified, and no link is followed.
"""

from __future__ import annotations

import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor

from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.folder import (
    SNAPSHOT,
    SnapshotError,
    Warn,
    is_left_over,
    list_snapshots,
    names_in,
    remove,
)
from hvd_ckpt.snapshots.ranges import OTHER_MODEL, Elements, Range
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_RANKS,
    REPLICATED,
    Layout,
    Manifest,
    TensorMetadata,
    libraries,
    rank_file,
    tensors_file,
)
from hvd_ckpt.snapshots.tensors import TensorFile, hash_file, load_state, map_tensors
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.schema import Wrong, shown

Read = Callable[[str, int, int], Tensor]
# Hash, and what os.stat() said, of files that this process has read.
_verified: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Snapshot:
    """A snapshot with a valid manifest. Its files are read, and verified by size and hash, when they are used.

    Args:
        path: its folder.
        manifest: its files, tensors, and when and by which versions they were written.
        rank: whose plain values :attr:`per_rank` has; None for this process's rank.

    Raises:
        SnapshotError: from all methods; a file is damaged, or no longer there.
    """

    path: Path
    manifest: Manifest
    rank: int | None = None

    @property
    def step(self) -> int:
        """Training steps taken."""
        return self.manifest.step

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return self.manifest.ranks

    @property
    def layout(self) -> Layout:
        """How its ranks shared the model."""
        return self.manifest.layout

    @property
    def replicas(self) -> int:
        """Number of ranks on each of its stages and parts."""
        return self.manifest.replicas

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        """All tensors, by name."""
        return self.manifest.tensors

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied weights, and the name that each is stored under."""
        return self.manifest.aliases

    @cached_property
    def replicated(self) -> Any:
        """Plain values that are the same on every rank."""
        return self.state(REPLICATED)

    @property
    def number(self) -> int | None:
        """The process that wrote :attr:`per_rank`."""
        rank = self.rank
        if rank is None:
            rank = hvd.rank() if hvd.is_initialized() else 0
        return None if rank >= self.replicas else self.number_of(rank)

    @cached_property
    def per_rank(self) -> Any:
        """The plain values of the rank; None if fewer ranks wrote the snapshot."""
        return None if self.number is None else self.state(rank_file(self.number))

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """For ``model.load_state_dict``, whole; tied ones are the same tensor."""
        weights = self.whole_tensors("weights")
        return {**weights, **{alias: weights[name] for alias, name in self.aliases.items()}}

    def number_of(self, rank: int) -> int:
        """The process of a rank there, on this process's stage and part if there were as many, else on the first."""
        grid, layout = current(), self.layout
        stage = grid.stage if grid.stages == layout.pipeline_stages else 0
        part = grid.part if grid.tensor == layout.tensor else 0
        return (stage * self.replicas + rank) * layout.tensor + part

    def state(self, name: str) -> Any:
        """The plain values in a file."""
        path = self._loadable(name)
        with naming(self.path, name):
            return load_state(path)

    def whole_tensors(self, kind: str) -> dict[str, Tensor]:
        """All tensors of a kind, whole, by the names of parameters and buffers."""
        named = self.manifest.names(kind)
        wanted = [Elements(name, 0, self.tensors[name].numel, self.tensors[name]) for name in named.values()]
        values = zip(named, wanted, self.read(wanted))
        return {name: elements.whole.unflatten(flat) for name, elements, flat in values}

    def read(self, wanted: Sequence[Elements], copied: bool = False) -> Iterator[Tensor]:
        """The values of these elements, 1-D, in the dtypes that they were saved in, on any layout of ranks.

        Only the files of ranks that have some of them are read. All of these are verified before this returns; values are then read
        one at a time. Unless they are ``copied``, they may be mapped from a file, not to be changed.

        Raises:
            Wrong: there is no such tensor, or it has another size.
        """
        found = []
        for elements in wanted:
            there = self.tensors.get(elements.name)
            if there is None:
                raise Wrong(f"it has no {shown(elements.name)}: {OTHER_MODEL}")
            if there.size != elements.whole.size:
                raise Wrong(
                    f"{shown(elements.name)} has size {list(there.size)}, and must have {list(elements.whole.size)}: {OTHER_MODEL}"
                )
            moved = not there.has_order_of(elements.whole)
            start, stop = (0, there.numel) if moved else (elements.start, elements.stop)
            ranges = self.manifest.by_tensor.get(elements.name, ())
            overlaps = [
                (rank, max(start, first) - first, min(stop, last) - first)
                for first, last, rank in ranges
                if first < stop and start < last
            ]
            found.append((elements, there, moved, overlaps))
        files = {
            rank: self.open_file(rank) for rank in sorted({one[0] for *_, each in found for one in each})
        }

        def values() -> Iterator[Tensor]:
            for elements, there, moved, overlaps in found:
                if len(overlaps) == 1 and (moved or not copied):
                    ((rank, start, stop),) = overlaps
                    flat = files[rank](elements.name, start, stop)
                else:
                    # Ranges are in order, without gap or overlap, so what is wanted of each follows on the one before.
                    sizes = [stop - start for _, start, stop in overlaps]
                    flat = torch.empty(sum(sizes), dtype=there.torch_dtype)
                    for (rank, start, stop), place in zip(overlaps, torch.split(flat, sizes)):
                        place.copy_(files[rank](elements.name, start, stop))
                if moved:
                    flat = elements.whole.flatten(there.unflatten(flat))[elements.start : elements.stop]
                    flat = flat.clone() if copied else flat
                yield flat

        return values()

    def open_file(self, rank: int) -> Read:
        """Verifies the file of a rank's ranges. The function reads elements of one: tensor, first and last + 1 element there."""
        name, ranges = tensors_file(rank), self.manifest.ranges[rank]
        path = self._loadable(name)
        with naming(self.path, name):
            file = TensorFile(path)
            if file.names() != ranges.keys():
                raise Wrong(f"it has other tensors than the manifest says: {DAMAGED}")
            for tensor, (start, stop) in ranges.items():
                if file.form(tensor) != ([stop - start], self.tensors[tensor].torch_dtype):
                    raise Wrong(f"{shown(tensor)} is not what the manifest says: {DAMAGED}")
        return file.read

    def verify(self, name: str) -> Path:
        """The path of a file whose content has the size and hash that the manifest says."""
        try:
            self.check_size(name)
            with naming(self.path, name):
                # A file that is as it was when this process verified it is not read once more.
                status, entry = os.stat(self.path / name), self.manifest.files[name]
                seen = (entry.sha256, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                # Within the clock's resolution, a change may leave no trace.
                is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > 2_000_000_000
                if seen not in _verified and hash_file(self.path / name) != entry:
                    raise Wrong(
                        f"its content is not what was written (SHA-256 differs from the manifest's): {DAMAGED}"
                    )
        except SnapshotError:
            # The manifest was read some time ago, and a run may have put another snapshot of this step in its place.
            if self._is_replaced():
                raise SnapshotError(
                    f"The snapshot '{self.path}' has been written again while it was read: resume again."
                ) from None
            raise
        if is_settled:
            _verified.add(seen)
        return self.path / name

    def check_size(self, name: str) -> None:
        """Raises a SnapshotError unless a file is there with its size."""
        with naming(self.path, name):
            size, expected = _check_regular(self.path / name), self.manifest.files[name].bytes
            if size != expected:
                raise Wrong(f"it has {size} bytes, and the manifest says {expected}: {DAMAGED}")

    def _is_replaced(self) -> bool:
        try:
            return _manifest_of(self.path) != self.manifest
        except SnapshotError:
            return False

    def _loadable(self, name: str) -> Path:
        size, memory = self.manifest.files[name].bytes, psutil.virtual_memory().total
        with naming(self.path, name):
            # Before the file is read: a sparse file of any size fits on a small disk.
            if size > memory:
                raise Wrong(
                    f"its {size >> 20} MiB are more than the {memory >> 20} MiB of memory here: {DAMAGED}"
                )
        return self.verify(name)


@dataclass(frozen=True)
class HeldSnapshot(Snapshot):
    """A snapshot that was never on the disk.

    Args:
        values: whole tensors, by name.
        common, own: plain values that are the same on every rank, and those that any rank has.
    """

    values: Mapping[str, Tensor] = field(default_factory=dict)
    common: Any = None
    own: Any = None

    @classmethod
    def of(
        cls, step: int, ranges: Sequence[Range], aliases: Mapping[str, str], common: Any, own: Any
    ) -> HeldSnapshot:
        """Of copies of whole tensors and plain values; no rank resumes with plain values of its own."""
        manifest = Manifest.model_construct(
            step=step,
            ranks=current().replicas,
            libraries=libraries(),
            layout=Layout(),
            ranges=({each.name: (each.start, each.stop) for each in ranges},),
            tensors={each.name: each.whole for each in ranges},
            aliases=dict(aliases),
        )
        values = {each.name: each.values for each in ranges}
        copied = map_tensors(
            (values, common, own), "state", lambda tensor, _: tensor.detach().to("cpu", copy=True)
        )
        return cls(Path("in memory"), manifest, MAX_RANKS, *copied)

    def state(self, name: str) -> Any:
        """A copy: an optimizer keeps the tensors that it loads, and would change those here."""
        state = self.common if name == REPLICATED else self.own
        return map_tensors(state, "state", lambda tensor, _: tensor.clone())

    def open_file(self, rank: int) -> Read:
        """Reads of the tensors here."""
        return lambda tensor, start, stop: self.values[tensor][start:stop]


def open_snapshot(path: Path) -> Snapshot:
    """A snapshot, if all files are there at their sizes and no others; their content is not verified yet.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
    """
    with naming(path, ""):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        names = set(os.listdir(path))
    snapshot = Snapshot(path, _manifest_of(path))
    with naming(path, ""):
        odd = names ^ {*snapshot.manifest.files, MANIFEST}
        if odd:
            raise Wrong(f"the file {shown(min(odd))} is missing or unknown: {DAMAGED}")
    for name in snapshot.manifest.files:
        snapshot.check_size(name)
    return snapshot


def _manifest_of(path: Path) -> Manifest:
    with naming(path, MANIFEST):
        _check_regular(path / MANIFEST)
        with open(path / MANIFEST, "rb") as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1))
        named = SNAPSHOT.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise Wrong(f"it says step {manifest.step}: give the folder its name back")
    return manifest


def _check_regular(path: Path) -> int:
    """The size of a file; raises Wrong if it is something else."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Wrong(f"it is a link, a folder or a device: {DAMAGED}")
    return status.st_size


@contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Turns an error in a file of a snapshot into one sentence, a SnapshotError."""
    where = f"{name}: " if name else ""
    try:
        yield
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{error}.") from None
    except OSError as error:
        reason = f"{os.strerror(error.errno) if error.errno else error}: use another snapshot"
        raise SnapshotError(f"The snapshot '{path}' cannot be used: {where}{reason}.") from None


def read(path: Path, rank: int | None = None) -> Snapshot:
    """Reads a snapshot with its weights, and verifies the sizes of all its files and the hashes of those that it reads.

    Args:
        rank: whose plain values to read: this process's by default.

    Raises:
        SnapshotError: it is missing or damaged, or not what a :class:`~hvd_ckpt.snapshots.writer.SnapshotWriter` writes.
    """
    opened = open_snapshot(Path(path))
    snapshot = Snapshot(opened.path, opened.manifest, rank)
    _ = snapshot.replicated, snapshot.per_rank, snapshot.weights
    return snapshot


def find(folder: Path) -> Snapshot | None:
    """The newest snapshot of which every file is as it was written; None if there are no snapshots.

    Warns of newer ones that are damaged. Reads all files of one snapshot.

    Raises:
        SnapshotError: there are snapshots, and all are damaged.
    """
    first: SnapshotError | None = None
    for path in list_snapshots(Path(folder)):
        try:
            snapshot = open_snapshot(path)
            for name in snapshot.manifest.files:
                snapshot.verify(name)
        except SnapshotError as error:
            run_warnings.warn(f"{str(error)[:-1]}. Looking for the one before.")
            first = first or error
        else:
            return snapshot
    if first is not None:
        raise SnapshotError(f"None of the snapshots in '{folder}' can be used; of the newest: {first}")
    return None


def newest(folder: Path) -> Path | None:
    """The newest snapshot with a valid manifest and all files at their sizes; None if no snapshot has. Content is not verified."""
    return next((path for path in list_snapshots(Path(folder)) if _looks_whole(path)), None)


def prune(folder: Path, keep: int, warn: Warn | None = None) -> None:
    """Removes snapshots older than the newest ``keep`` complete ones, and what interrupted writes have left. For one rank to call.

    A folder that fails to be removed stays, with a warning. Folders that this process writes to stay too.

    Args:
        warn: takes the warnings in place of Python's.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"prune: keep is {keep}: keep 1 snapshot or more")
    folder, warn = Path(folder), warn or warnings.warn
    complete, kept, old = 0, set(), []
    for path in list_snapshots(folder):
        if complete == keep:
            old.append(path)
        else:
            kept.add(path)
            # A damaged snapshot does not count: ``keep`` good ones stay, and with them the damaged ones in between.
            complete += _looks_whole(path)
    remove(old, warn)
    left_over = (folder / name for name in names_in(folder))
    remove([path for path in left_over if path not in kept and is_left_over(path)], warn)


def _looks_whole(path: Path) -> bool:
    try:
        open_snapshot(path)
    except SnapshotError:
        return False
    return True
