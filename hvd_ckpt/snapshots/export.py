"""The whole weights of a snapshot, of any number of ranks and any stage, in one file.

It needs memory for one model, or for three if each rank has its own weights, since their sum is in float64.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.snapshots.files import SnapshotFiles, naming, open_snapshot
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.schema import DAMAGED, MANIFEST, REPLICATED, rank_file, shard_file
from hvd_ckpt.snapshots.tensors import save_weights
from hvd_ckpt.utils.schema import Wrong, shown

Write = Callable[[Path, dict[str, Tensor]], None]


class Exported(NamedTuple):
    """The result of :func:`export`: training steps taken, ranks that wrote the snapshot, tensors and bytes."""

    step: int
    ranks: int
    tensors: int
    bytes: int


def export(path: Path, output: Path, ema: bool = False, write: Write | None = None) -> Exported:
    """Writes the weights and buffers of a snapshot, with the names and shapes of ``state_dict()``, as one safetensors file.

    Tied weights are there under each of their names. Of a run of local SGD they are the mean of all ranks'. The file is there
    completely or not at all.

    Args:
        path: path of a snapshot.
        output: path of the file, in a folder that exists.
        ema: write the moving averages of the weights in their place.
        write: writes a file or folder of another format under the name that it is given.

    Raises:
        SnapshotError: the snapshot is missing or damaged, or has no averages.
        FileExistsError: something has the file's name.
        OSError: the file cannot be written.
    """
    _check_new(output)
    files = open_snapshot(path)
    weights = whole_weights(files, ema)
    unnamed = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        if write is None:
            save_weights(unnamed, weights)
        else:
            write(unnamed, weights)
        # Asked again: reading takes long, and rename() would replace a file that has got this name meanwhile.
        _check_new(output)
        os.rename(unnamed, output)
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{path}' cannot be exported: {error}.") from None
    finally:
        if unnamed.is_dir():
            shutil.rmtree(unnamed, ignore_errors=True)
        else:
            unnamed.unlink(missing_ok=True)
    written = [output] if output.is_file() else list(output.iterdir())
    size = sum(file.stat().st_size for file in written)
    return Exported(files.manifest.step, files.manifest.ranks, len(weights), size)


def write_pt(path: Path, weights: dict[str, Tensor]) -> None:
    """Writes a ``state_dict()`` with ``torch.save``, for ``torch.load(..., weights_only=True)``."""
    with open(path, "xb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())


def whole_weights(files: SnapshotFiles, ema: bool = False) -> dict[str, Tensor]:
    """Weights and buffers of a snapshot under all their names, or with ``ema`` the averages in place of those that have one.

    Raises:
        SnapshotError: the snapshot is damaged, or has no averages.
    """
    weights = _means(files, files.weights())
    if ema:
        averages = _averages(files, weights)
        aliases = {
            alias: averages[name] for alias, name in files.manifest.aliases.items() if name in averages
        }
        weights.update({**averages, **aliases})
    return weights


def _means(files: SnapshotFiles, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of all ranks' (groups') weights and float buffers, where they have their own; else rank 0's, which are given."""
    manifest, sums, specs = files.manifest, {}, {}
    added: dict[str, int] = {}
    written = 0  # ranks whose weights are those of the snapshot
    for rank in range(manifest.ranks):
        file = rank_file(rank)
        state = files.state(file, mmap=True)
        local = state.get("local") if isinstance(state, dict) else None
        if not isinstance(local, dict):
            return weights
        own = {**local["weights"], **state["buffers"]}
        if rank == 0:
            # The weights of the snapshot are those of rank 0, or of its whole group where they are in shards.
            own = weights
            for name, first in weights.items():
                if name not in manifest.aliases and (first.is_floating_point() or first.is_complex()):
                    stored = None if manifest.sharding is None else manifest.sharding.parameters.get(name)
                    specs[name] = TensorSpec.of(first) if stored is None else stored.spec
                    wide = torch.promote_types(first.dtype, torch.float64)
                    sums[name], added[name] = torch.zeros(first.numel(), dtype=wide), 0
        pieces = local["pieces"]["weights"] if rank and local["pieces"] is not None else []
        ranges = {each: (start, stop) for each, start, stop in pieces}
        with naming(files.path, file):
            for name in own.keys() & sums.keys():
                value, spec = own[name], specs[name]
                start, stop = ranges.get(name, (0, spec.numel))
                shape = (stop - start,) if name in ranges else spec.shape
                if not isinstance(value, Tensor) or value.shape != shape or stop > spec.numel:
                    raise Wrong(f"it has no {shown(name)} that fits the weights: {DAMAGED}")
                sums[name][start:stop] += value if name in ranges else spec.flatten(value)
                added[name] += stop - start
        written += local["optimizer"] is None
    means = {}
    for name, total in sums.items():
        # Each rank has its own buffers, and each group one copy of the weights: `written` ranks are a
        # group. A shard that is missing shows in the count of elements.
        copies = manifest.ranks if name in state["buffers"] else manifest.ranks // max(written, 1)
        with naming(files.path, MANIFEST):
            if added[name] != copies * total.numel():
                raise Wrong(f"its ranks do not have {copies} times each element of {shown(name)}: {DAMAGED}")
        means[name] = specs[name].unflatten(total / copies).to(weights[name].dtype)
    aliases = {alias: means[name] for alias, name in manifest.aliases.items() if name in means}
    return {**weights, **means, **aliases}


def _averages(files: SnapshotFiles, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages by parameter, in the parameters' dtypes."""
    sharding = files.manifest.sharding
    state = files.state(REPLICATED)
    ema = state.get("ema") if isinstance(state, dict) else None
    with naming(files.path, REPLICATED):
        if not isinstance(ema, dict):
            raise Wrong("it has no averages of the weights: leave out --ema")
        if sharding is None:
            averages = ema.get("averages")
            if not isinstance(averages, dict):
                raise Wrong(f"ema has no averages: {DAMAGED}")
            for name, average in averages.items():
                if (
                    name not in weights
                    or not isinstance(average, Tensor)
                    or average.shape != weights[name].shape
                ):
                    raise Wrong(f"the average of {ascii(name)[:60]} does not fit its weight: {DAMAGED}")
            return {name: average.to(weights[name].dtype) for name, average in averages.items()}

    def of_rank(rank: int) -> tuple[str, Any]:
        name, shards = shard_file(rank), sharding.optimizer[rank]
        part = files.state(name, mmap=True)
        averages = part.get("averages") if isinstance(part, dict) else None
        if not isinstance(averages, dict) or set(averages) != set(range(len(shards))):
            return name, None
        return name, {shard.name: averages[number] for number, shard in enumerate(shards)}

    return files.unsharded(sharding.optimizer, of_rank, exact=False)


def _check_new(output: Path) -> None:
    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
