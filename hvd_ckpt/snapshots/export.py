"""The whole weights of a snapshot, of any number of ranks and any stage, in one file.

It needs memory for one model, or for three if each rank has its own weights, since their sum is in float64.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import Snapshot, naming
from hvd_ckpt.snapshots.schema import DAMAGED, MANIFEST, Range
from hvd_ckpt.snapshots.tensors import save_tensors
from hvd_ckpt.utils.schema import Wrong, shown

Write = Callable[[Path, dict[str, Tensor]], object]


def export(
    snapshot: Snapshot, output: Path, ema: bool = False, write: Write = save_tensors
) -> tuple[int, int]:
    """Writes the weights and buffers of a snapshot, with the names and shapes of ``state_dict()``, as one safetensors file.

    Tied weights are there under each of their names. Of a run of local SGD they are the mean of all ranks'. The file is there
    completely or not at all. Returns the numbers of tensors and bytes that were written.

    Args:
        snapshot: of any number of ranks.
        output: path of the file, in a folder that exists.
        ema: write the moving averages of the weights in their place.
        write: writes a file or folder under the name that it is given.

    Raises:
        SnapshotError: the snapshot is damaged, or has no averages.
        FileExistsError: something has the file's name.
        OSError: the file cannot be written.
    """
    weights = whole_weights(snapshot, ema)
    unnamed = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        write(unnamed, weights)
        if os.path.lexists(output):  # which rename() would replace
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
        os.rename(unnamed, output)
    except Wrong as error:
        raise SnapshotError(f"The snapshot '{snapshot.path}' cannot be exported: {error}.") from None
    finally:
        if unnamed.is_dir():
            shutil.rmtree(unnamed, ignore_errors=True)
        else:
            unnamed.unlink(missing_ok=True)
    written = [output] if output.is_file() else list(output.iterdir())
    return len(weights), sum(file.stat().st_size for file in written)


def write_pt(path: Path, weights: dict[str, Tensor]) -> None:
    """Writes a ``state_dict()`` with ``torch.save``, for ``torch.load(..., weights_only=True)``."""
    with open(path, "xb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())


def whole_weights(snapshot: Snapshot, ema: bool = False) -> dict[str, Tensor]:
    """Weights and buffers of a snapshot under all their names, or with ``ema`` the averages in place of those that have one."""
    weights = snapshot.whole_tensors("weights")
    if snapshot.manifest.layout.apart:
        _take_means(snapshot, weights)
    if ema:
        averages = snapshot.whole_tensors("average")
        with naming(snapshot.path, MANIFEST):
            if not averages:
                raise Wrong("it has no averages of the weights: leave out --ema")
            for name, average in averages.items():
                if name not in weights or average.shape != weights[name].shape:
                    raise Wrong(f"the average of {shown(name)} does not fit its weight: {DAMAGED}")
        weights.update({name: average.to(weights[name].dtype) for name, average in averages.items()})
    return {**weights, **{alias: weights[name] for alias, name in snapshot.manifest.aliases.items()}}


def _take_means(snapshot: Snapshot, weights: dict[str, Tensor]) -> None:
    """Replaces floating-point weights by the mean of all copies of them, and buffers by that of all ranks."""
    names: dict[str, list[str]] = {}  # of the copies of each
    for tensor in snapshot.manifest.tensors:
        kind, _, name = tensor.partition("/")
        if kind.startswith(("weights@", "buffers@")):
            first = [f"weights/{name}"] if kind.startswith("weights") else []
            names.setdefault(name, first).append(tensor)
    for name, copies in names.items():
        weight = weights.get(name)
        if weight is None or not (weight.is_floating_point() or weight.is_complex()):
            continue
        whole = snapshot.manifest.tensors[f"weights/{name}"]
        total = torch.zeros(whole.numel, dtype=torch.promote_types(weight.dtype, torch.float64))
        with naming(snapshot.path, MANIFEST):
            for values in snapshot.read([Range(copy, 0, whole.numel, whole) for copy in copies]):
                total += values
        weights[name] = whole.unflatten(total / len(copies)).to(weight.dtype)
