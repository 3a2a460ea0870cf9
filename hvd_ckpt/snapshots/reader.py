"""Reading of snapshots by one process or by each rank of a job, and the search for the newest.

On many ranks, the first rank opens a snapshot (:func:`find_files`, :func:`open_snapshot`) and sends the manifest to the others.
Each rank reads only its own files, and the shards that it needs (:func:`read_rank`), since n ranks would otherwise read n files
each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_ckpt.processes.grid import current
from hvd_ckpt.snapshots.files import SnapshotFiles, open_snapshot
from hvd_ckpt.snapshots.folder import SnapshotError, Warn, is_left_over, list_snapshots, names_in, remove
from hvd_ckpt.snapshots.schema import REPLICATED, Manifest, ShardingMetadata, rank_file
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.cuts import Cut


@dataclass(frozen=True)
class Snapshot:
    """The result of :func:`read`; all tensors are on the CPU.

    Attributes:
        step: training steps taken.
        ranks: number of ranks that wrote it.
        first_weights: the weights and buffers that are not in shards.
        replicated: state that is the same on every rank.
        per_stage: state of this rank, on each pipeline stage, of its part, or the first if there were other parts; empty if fewer
            ranks wrote the snapshot.
        files: those that it is read from; None if it was never on the disk.
        cuts: how tensor parallelism cuts the weights here, by all their names; :attr:`weights` are this part's slices.
    """

    step: int
    ranks: int
    first_weights: dict[str, Tensor]
    replicated: Any
    per_stage: tuple[Any, ...]
    files: SnapshotFiles | None
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """For ``model.load_state_dict``; tied ones are the same tensor. Shards of all ranks are read when this is first used.

        Raises:
            SnapshotError: a file is damaged, or no longer there.
        """
        weights = self.first_weights if self.files is None else self.files.weights(self.first_weights)
        return {name: self.slice_of(name, whole) for name, whole in weights.items()}

    @cached_property
    def weight_specs(self) -> dict[str, Tensor]:
        """As :attr:`weights`, on the device "meta": names, shapes and dtypes, for which no shard is read."""
        specs = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.first_weights.items()}
        if self.files is not None:
            for name, whole in self.files.weights_in_shards.items():
                specs[name] = torch.empty(whole.size, dtype=whole.torch_dtype, device="meta")
            specs.update({alias: specs[name] for alias, name in self.files.manifest.aliases.items()})
        return {name: self.slice_of(name, whole) for name, whole in specs.items()}

    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        """This part's slice of a weight."""
        return self.cuts[name].of(whole, current().tensor, current().part) if name in self.cuts else whole

    @property
    def manifest(self) -> Manifest | None:
        """Its files, shards, and when and by which versions they were written; None if it was never on the disk."""
        return None if self.files is None else self.files.manifest

    @property
    def path(self) -> Path | None:
        """Its folder; None if it was never on the disk."""
        return None if self.files is None else self.files.path

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
        """The place of the ranks' shards; None if nothing was sharded."""
        return None if self.manifest is None else self.manifest.sharding


def read(path: Path, rank: int | None = None) -> Snapshot:
    """Reads a snapshot, and verifies the sizes of all its files and the hashes of those that it reads.

    Args:
        rank: whose per-rank state to read, of all pipeline stages: this process's by default. The other ranks' is not read.

    Raises:
        SnapshotError: it is missing or damaged, or not what a :class:`~hvd_ckpt.snapshots.writer.SnapshotWriter` writes.
    """
    snapshot = read_rank(open_snapshot(Path(path)), rank)
    _ = snapshot.weights
    return snapshot


def read_rank(files: SnapshotFiles, rank: int | None = None) -> Snapshot:
    """As :func:`read`, but no shards of the weights, which are read when they are used; verifies the files that it reads."""
    if rank is None:
        rank = hvd.rank() if hvd.is_initialized() else 0
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
        files.first_weights(),
        files.state(REPLICATED),
        per_stage,
        files=files,
    )


def find(folder: Path) -> Path | None:
    """The newest snapshot of which every file is as it was written; None if there are no snapshots.

    Warns of newer ones that are damaged. Reads all files of one snapshot.

    Raises:
        SnapshotError: there are snapshots, and all are damaged.
    """
    files = find_files(folder)
    return None if files is None else files.path


def find_files(folder: Path) -> SnapshotFiles | None:
    """As :func:`find`, with the manifest by which the files were verified."""
    first: SnapshotError | None = None
    for path in list_snapshots(Path(folder)):
        try:
            files = open_snapshot(path)
            for name in files.manifest.files:
                files.verify(name)
        except SnapshotError as error:
            run_warnings.warn(f"{str(error)[:-1]}. Looking for the one before.")
            first = first or error
        else:
            return files
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
