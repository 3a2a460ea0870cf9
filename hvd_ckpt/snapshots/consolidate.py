"""The whole weights of a snapshot, of any number of ranks and any stage, as one safetensors file. Takes memory for one model."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hvd_ckpt.schema import Wrong
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import SnapshotFiles, naming, open_snapshot
from hvd_ckpt.snapshots.schema import DAMAGED, REPLICATED, shard_file
from hvd_ckpt.snapshots.tensors import save_weights


class Consolidated(NamedTuple):
    """The result of :func:`consolidate`: training steps taken, ranks that wrote the snapshot, tensors and bytes of the file."""

    step: int
    ranks: int
    tensors: int
    bytes: int


def consolidate(path: Path, output: Path, ema: bool = False) -> Consolidated:
    """Writes the weights and buffers of a snapshot as one safetensors file, with the names and shapes of ``state_dict()``.

    Tied weights are there under each of their names. The file is there completely or not at all.

    Args:
        path: of a snapshot.
        output: of the file, in a folder that exists.
        ema: write the moving averages of the weights in their place.

    Raises:
        SnapshotError: the snapshot is missing or damaged, or has no averages.
        FileExistsError: something has the file's name.
        OSError: the file cannot be written.
    """
    _check_new(output)
    files = open_snapshot(path)
    weights = files.weights()
    if ema:
        averages = _averages(files, weights)
        aliases = {
            alias: averages[name] for alias, name in files.manifest.aliases.items() if name in averages
        }
        weights.update({**averages, **aliases})
    unnamed = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        written = save_weights(unnamed, weights)
        _check_new(output)
        os.rename(unnamed, output)
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{path}' cannot be consolidated: {error}.") from None
    finally:
        unnamed.unlink(missing_ok=True)
    return Consolidated(files.manifest.step, files.manifest.ranks, len(weights), written.bytes)


def _averages(files: SnapshotFiles, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages by parameter, in the parameters' dtypes."""
    sharding = files.manifest.sharding
    state = files.state(REPLICATED)
    ema = state.get("ema") if isinstance(state, dict) else None
    with naming(files.path, REPLICATED):
        if not isinstance(ema, dict):
            raise Wrong("it has no averages of the weights: consolidate without --ema")
        if sharding is None:
            found = ema.get("averages")
            if not isinstance(found, dict):
                raise Wrong(f"ema has no averages: {DAMAGED}")
            for name, average in found.items():
                if (
                    name not in weights
                    or not isinstance(average, Tensor)
                    or average.shape != weights[name].shape
                ):
                    raise Wrong(f"the average of {ascii(name)[:60]} does not fit its weight: {DAMAGED}")
            return {name: average.to(weights[name].dtype) for name, average in found.items()}

    def of_rank(rank: int) -> tuple[str, Any]:
        name, shards = shard_file(rank), sharding.optimizer[rank]
        part = files.state(name, mmap=True)
        found = part.get("averages") if isinstance(part, dict) else None
        if not isinstance(found, dict) or set(found) != set(range(len(shards))):
            return name, None
        return name, {shard.name: found[number] for number, shard in enumerate(shards)}

    return files.unsharded(sharding.optimizer, of_rank, exact=False)


def _check_new(output: Path) -> None:
    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
