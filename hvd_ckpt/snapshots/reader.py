"""Snapshots as they are read: verified by size and hash, and found, the newest first.

Nothing in a snapshot is executed when it is loaded; every name, size and hash is verified, and no link is followed.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    MODEL,
    REPLICATED,
    Manifest,
    ShardingMetadata,
    Shards,
    TensorMetadata,
    rank_file,
    weights_file,
)
from hvd_ckpt.snapshots.tensors import hash_file, load_state, load_weights
from hvd_ckpt.utils.schema import MAX_BYTES, Wrong, shown


@dataclass(frozen=True)
class Snapshot:
    """The result of :func:`read`; all tensors are on the CPU.

    Attributes:
        step: training steps taken.
        ranks: number of ranks that wrote it.
        weights: for ``model.load_state_dict``; tied ones are the same tensor.
        replicated: state that is the same on every rank.
        per_stage: state of this rank, on each pipeline stage, of its part, or the first if there were other parts; empty if fewer
            ranks wrote the snapshot.
        manifest: its files, shards, and when and by which versions they were written; None if it was never on the disk.
        path: its folder; None if it was never on the disk.
    """

    step: int
    ranks: int
    weights: dict[str, Tensor]
    replicated: Any
    per_stage: tuple[Any, ...]
    manifest: Manifest | None
    path: Path | None = None

    @property
    def per_rank(self) -> Any:
        """State of this rank, on the first stage; None if fewer ranks wrote the snapshot."""
        return self.per_stage[0] if self.per_stage else None

    @property
    def pipeline_stages(self) -> int:
        """Pipeline stages of the job that wrote it."""
        return 1 if self.sharding is None else self.sharding.pipeline_stages

    @property
    def replicas(self) -> int:
        """Number of ranks on each of its stages and parts."""
        return self.ranks // (self.pipeline_stages * self.tensor)

    @property
    def tensor(self) -> int:
        """Parts of a layer in the job that wrote it."""
        return 1 if self.sharding is None else self.sharding.tensor

    @property
    def sharding(self) -> ShardingMetadata | None:
        """Where the ranks' shards are; None if nothing was sharded."""
        return None if self.manifest is None else self.manifest.sharding


@dataclass(frozen=True)
class SnapshotFiles:
    """A snapshot of which all files are there; its methods raise a SnapshotError that names snapshot and file."""

    path: Path
    manifest: Manifest

    def verify(self, name: str) -> Path:
        """The path of a file whose content has the hash that the manifest says."""
        with naming(self.path, name):
            if hash_file(self.path / name) != self.manifest.files[name]:
                raise Wrong(
                    f"its content is not what was written (SHA-256 differs from the manifest's): {DAMAGED}"
                )
        return self.path / name

    def state(self, name: str, mmap: bool = False) -> Any:
        """The state dict in a file; with ``mmap`` its tensors are mapped from the file."""
        path = self._loadable(name)
        with naming(self.path, name):
            return load_state(path, mmap)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors in a safetensors file."""
        path = self._loadable(name)
        with naming(self.path, name):
            return load_weights(path)

    def _loadable(self, name: str) -> Path:
        size, memory = self.manifest.files[name].bytes, psutil.virtual_memory().total
        with naming(self.path, name):
            # Before the file is read: a sparse file of any size fits on a small disk.
            if size > memory:
                raise Wrong(
                    f"its {size >> 20} MiB are more than the {memory >> 20} MiB of memory here: {DAMAGED}"
                )
        return self.verify(name)

    def weights(self) -> dict[str, Tensor]:
        """All weights and buffers, sharded or not, under all their names."""
        weights, aliases, sharding = self.tensors(MODEL), self.manifest.aliases, self.manifest.sharding
        with naming(self.path, MANIFEST):
            if sharding is not None and sharding.weights is not None:
                twice = sorted(set(weights) & set(sharding.parameters))
                if twice:
                    raise Wrong(f"sharding has {shown(twice[0])}, which rank 0 has whole: {DAMAGED}")
                weights.update(self.unsharded(sharding.weights, self._weights_of_rank))
            for alias, name in aliases.items():
                if alias in weights or name not in weights:
                    raise Wrong(
                        f"aliases has {shown(alias)} of {shown(name)}, which does not fit the weights: {DAMAGED}"
                    )
        return {**weights, **{alias: weights[name] for alias, name in aliases.items()}}

    def _weights_of_rank(self, rank: int) -> tuple[str, dict[str, Tensor]]:
        name = weights_file(rank)
        return name, self.tensors(name)

    def unsharded(
        self, ranks: Shards, read: Callable[[int], tuple[str, Any]], exact: bool = True
    ) -> dict[str, Tensor]:
        """Whole parameters from the shards of all ranks.

        Args:
            read: returns for a rank the name of its file, and its shards by parameter.
            exact: whether shards have the dtypes of their parameters; else they are converted.
        """
        assert self.manifest.sharding is not None
        parameters, tensor = self.manifest.sharding.parameters, self.manifest.sharding.tensor
        flats: dict[str, list[Tensor]] = {}

        def flats_of(name: str) -> list[Tensor]:
            whole = parameters[name]
            count = 1 if whole.how is None else tensor
            sizes = [whole.spec_of(tensor, part).numel for part in range(count)]
            return flats.setdefault(name, [torch.empty(size, dtype=whole.torch_dtype) for size in sizes])

        for name in (name for name, parameter in parameters.items() if not parameter.numel):
            flats_of(name)
        for rank, shards in enumerate(ranks):
            name, values_by_name = read(rank)
            with naming(self.path, name):
                if not isinstance(values_by_name, dict) or set(values_by_name) != {
                    shard.name for shard in shards
                }:
                    raise Wrong(f"it has other parameters than the manifest says: {DAMAGED}")
                for shard in shards:
                    # Taken out, so that a shard is freed when its elements have been copied.
                    whole, values = parameters[shard.name], values_by_name.pop(shard.name)
                    fits = isinstance(values, Tensor) and values.shape == (shard.size,)
                    if not fits or (exact and values.dtype != whole.torch_dtype):
                        raise Wrong(f"{shown(shard.name)} is not what the manifest says: {DAMAGED}")
                    of_parts = flats[shard.name] if shard.name in flats else flats_of(shard.name)
                    of_parts[rank % len(of_parts)][shard.offset : shard.stop] = values
        return {name: _whole(parameters[name], of_parts) for name, of_parts in flats.items()}


def _whole(parameter: TensorMetadata, flats: Sequence[Tensor]) -> Tensor:
    """A parameter from the elements of each part's slice."""
    if parameter.how is None:
        return parameter.spec.unflatten(flats[0])
    slices = [parameter.spec_of(len(flats), part).unflatten(flat) for part, flat in enumerate(flats)]
    return parameter.how.whole(slices)


def read(path: Path, rank: int | None = None) -> Snapshot:
    """Reads a snapshot, and verifies the sizes of all its files and the hashes of those that it reads.

    Args:
        rank: whose per-rank state to read, of all pipeline stages: this process's by default. The other ranks' is not read.

    Raises:
        SnapshotError: it is missing or damaged, or not what a :class:`~hvd_ckpt.snapshots.writer.SnapshotWriter` writes.
    """
    if rank is None:
        rank = hvd.rank() if hvd.is_initialized() else 0
    files = open_snapshot(Path(path))
    manifest = files.manifest
    stages, tensor = (
        (1, 1) if manifest.sharding is None else (manifest.sharding.pipeline_stages, manifest.sharding.tensor)
    )
    replicas = manifest.ranks // (stages * tensor)
    part = current().part if current().tensor == tensor else 0
    # Process (stage * replicas + rank) * tensor + part wrote the file: one file of each stage.
    of_rank = range(rank * tensor + part, manifest.ranks, replicas * tensor) if rank < replicas else range(0)
    per_stage = tuple(files.state(rank_file(number)) for number in of_rank)
    return Snapshot(
        manifest.step,
        manifest.ranks,
        files.weights(),
        files.state(REPLICATED),
        per_stage,
        manifest=manifest,
        path=files.path,
    )


def open_snapshot(path: Path) -> SnapshotFiles:
    """The files of a snapshot, if all are there at their sizes and no others; their content is not verified yet.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
    """
    with naming(path, ""):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        names = set(os.listdir(path))
    with naming(path, MANIFEST):
        _check_regular(path / MANIFEST)
        with open(path / MANIFEST, "rb") as file:
            manifest = Manifest.parse(file.read(MAX_BYTES + 1))
        named = SNAPSHOT.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise Wrong(f"it says step {manifest.step}: give the folder its name back")
    with naming(path, ""):
        odd = names ^ {*manifest.files, MANIFEST}
        if odd:
            raise Wrong(f"the file {shown(min(odd))} is missing or unknown: {DAMAGED}")
    for name, entry in manifest.files.items():
        with naming(path, name):
            size = _check_regular(path / name)
            if size != entry.bytes:
                raise Wrong(f"it has {size} bytes, and the manifest says {entry.bytes}: {DAMAGED}")
    return SnapshotFiles(path, manifest)


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


def _verify(path: Path) -> None:
    files = open_snapshot(path)
    for name in files.manifest.files:
        files.verify(name)


def _looks_whole(path: Path) -> bool:
    try:
        open_snapshot(path)
    except SnapshotError:
        return False
    return True
