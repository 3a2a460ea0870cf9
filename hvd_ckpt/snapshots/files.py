"""The files of a snapshot, each verified by size and hash when it is read.

Nothing in a snapshot is executed when it is loaded; every name, size and hash is verified, and no link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from hvd_ckpt.snapshots.folder import SNAPSHOT, SnapshotError
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODEL,
    Manifest,
    ShardMetadata,
    Shards,
    TensorMetadata,
    weights_file,
)
from hvd_ckpt.snapshots.tensors import hash_file, load_state, load_weights
from hvd_ckpt.utils.schema import Wrong, shown


@dataclass(frozen=True)
class SnapshotFiles:
    """A snapshot with a valid manifest; the methods verify each file that they read, and raise a SnapshotError that names it."""

    path: Path
    manifest: Manifest

    def check_size(self, name: str) -> None:
        """Raises a SnapshotError unless a file is there with its size."""
        with naming(self.path, name):
            size, expected = _check_regular(self.path / name), self.manifest.files[name].bytes
            if size != expected:
                raise Wrong(f"it has {size} bytes, and the manifest says {expected}: {DAMAGED}")

    def verify(self, name: str) -> Path:
        """The path of a file whose content has the hash that the manifest says."""
        try:
            self.check_size(name)
            with naming(self.path, name):
                if hash_file(self.path / name) != self.manifest.files[name]:
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
        return self.path / name

    def _is_replaced(self) -> bool:
        try:
            return _manifest_of(self.path) != self.manifest
        except SnapshotError:
            return False

    def state(self, name: str, mmap: bool = False) -> Any:
        """The state dict in a file; with ``mmap`` its tensors are mapped from the file."""
        path = self._loadable(name)
        with naming(self.path, name):
            return load_state(path, mmap)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors in a safetensors file, mapped from it."""
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

    @property
    def weights_in_shards(self) -> Mapping[str, TensorMetadata]:
        """The parameters, and with pipeline stages or parts the buffers, that ranks have written in shards."""
        sharding = self.manifest.sharding
        return {} if sharding is None or sharding.weights is None else sharding.parameters

    def first_weights(self) -> dict[str, Tensor]:
        """The weights and buffers that are not in shards, which rank 0 has written; mapped from their file."""
        weights, in_shards = self.tensors(MODEL), self.weights_in_shards
        with naming(self.path, MANIFEST):
            twice = sorted(set(weights) & set(in_shards))
            if twice:
                raise Wrong(f"sharding has {shown(twice[0])}, which rank 0 has whole: {DAMAGED}")
            names = {*weights, *in_shards}
            for alias, name in self.manifest.aliases.items():
                if alias in names or name not in names:
                    raise Wrong(
                        f"aliases has {shown(alias)} of {shown(name)}, which does not fit the weights: {DAMAGED}"
                    )
        return weights

    def weights(self, first: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """All weights and buffers, sharded or not, under all their names; those in shards from the files of all ranks.

        Args:
            first: result of :meth:`first_weights`, if it was called before.
        """
        weights, sharding = dict(self.first_weights() if first is None else first), self.manifest.sharding
        if sharding is not None and sharding.weights is not None:
            weights.update(self.unsharded(sharding.weights, self._weights_of))
        return {**weights, **{alias: weights[name] for alias, name in self.manifest.aliases.items()}}

    def weight_shards(self, rank: int) -> list[tuple[ShardMetadata, Tensor]]:
        """A rank's shards of the weights, 1-D, mapped from its file."""
        sharding = self.manifest.sharding
        assert sharding is not None and sharding.weights is not None
        return list(self._checked(sharding.weights[rank], *self._weights_of(rank)))

    def _weights_of(self, rank: int) -> tuple[str, dict[str, Tensor]]:
        name = weights_file(rank)
        return name, self.tensors(name)

    def _checked(
        self, shards: Sequence[ShardMetadata], name: str, values_by_name: Any, exact: bool = True
    ) -> Iterator[tuple[ShardMetadata, Tensor]]:
        """The shards of a rank in the file of this name, if they are what the manifest says."""
        assert self.manifest.sharding is not None
        parameters = self.manifest.sharding.parameters
        with naming(self.path, name):
            if not isinstance(values_by_name, dict) or set(values_by_name) != {
                shard.name for shard in shards
            }:
                raise Wrong(f"it has other parameters than the manifest says: {DAMAGED}")
            for shard in shards:
                # Taken out, so that a shard is freed when its elements have been copied.
                values = values_by_name.pop(shard.name)
                fits = isinstance(values, Tensor) and values.shape == (shard.size,)
                if not fits or (exact and values.dtype != parameters[shard.name].torch_dtype):
                    raise Wrong(f"{shown(shard.name)} is not what the manifest says: {DAMAGED}")
                yield shard, values

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
            for shard, values in self._checked(shards, *read(rank), exact):
                of_parts = flats[shard.name] if shard.name in flats else flats_of(shard.name)
                # Parts are numbered last among the processes, so this is the rank's part. What is not cut has
                # one flat for all.
                of_parts[rank % len(of_parts)][shard.offset : shard.stop] = values
        return {name: _whole(parameters[name], of_parts) for name, of_parts in flats.items()}


def _whole(parameter: TensorMetadata, flats: Sequence[Tensor]) -> Tensor:
    """A parameter from the elements of each part's slice."""
    if parameter.how is None:
        return parameter.spec.unflatten(flats[0])
    slices = [parameter.spec_of(len(flats), part).unflatten(flat) for part, flat in enumerate(flats)]
    return parameter.how.whole(slices)


def open_snapshot(path: Path) -> SnapshotFiles:
    """The files of a snapshot, if all are there at their sizes and no others; their content is not verified yet.

    Raises:
        SnapshotError: there is no snapshot, or it is damaged.
    """
    with naming(path, ""):
        if path.is_symlink():
            raise Wrong("it is a link: name the folder itself")
        names = set(os.listdir(path))
    files = SnapshotFiles(path, _manifest_of(path))
    with naming(path, ""):
        odd = names ^ {*files.manifest.files, MANIFEST}
        if odd:
            raise Wrong(f"the file {shown(min(odd))} is missing or unknown: {DAMAGED}")
    for name in files.manifest.files:
        files.check_size(name)
    return files


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
