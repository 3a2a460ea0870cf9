"""Conversion of a snapshot of the earlier version, in which each kind of state had a form of its own, into one of ranges.

The weights were in ``model.safetensors`` (whole) or ``weights-N.safetensors`` (shards), the optimizer's state in ``replicated.pt``
(whole) or ``shard-N.pt`` (shards).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.reduction.buckets import TensorSpec
from hvd_ckpt.snapshots.content import SavedState, complete, staged, write_content
from hvd_ckpt.snapshots.folder import (
    SnapshotError,
    discard,
    make_folder,
    name_of,
    reason_of,
    temporary_name,
)
from hvd_ckpt.snapshots.model import divided, options_of, plain_values
from hvd_ckpt.snapshots.reader import naming
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    REPLICATED,
    FileEntry,
    Layout,
    Range,
    TensorMetadata,
    document_of,
    rank_file,
)
from hvd_ckpt.snapshots.tensors import TensorFile, hash_file, load_state
from hvd_ckpt.utils.cuts import Cut
from hvd_ckpt.utils.schema import Wrong


def convert(old: Path, folder: Path) -> Path:
    """Writes a snapshot of the earlier version as one of this version; returns its path.

    Args:
        old: the snapshot.
        folder: folder of the new one, such as RUN/snapshots.

    Raises:
        SnapshotError: the snapshot is damaged or not of the earlier version, or cannot be written.
    """
    with naming(old):
        manifest = document_of((old / MANIFEST).read_bytes())
        if manifest.get("version") != 1:
            raise Wrong("it is not of the earlier version: use it as it is")
        for name, entry in manifest["files"].items():
            if Path(name).name != name or hash_file(old / name) != FileEntry(**entry):
                raise Wrong(f"{json.dumps(name)} is not what was written: {DAMAGED}")
        try:
            states = _Old(old, manifest).states()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Wrong(
                f"it is not what the earlier version writes ({type(error).__name__}: {error})"
            ) from None
    temporary = folder / temporary_name(name_of(manifest["step"]))
    try:
        make_folder(temporary)
        written = [
            write_content(temporary, rank, staged(rank, None, state)) for rank, state in enumerate(states)
        ]
        complete(temporary, manifest["step"], written, warnings.warn)
    except (OSError, Wrong) as error:
        discard(temporary)
        raise SnapshotError(f"The snapshot '{old}' was not converted: {reason_of(error)}.") from None
    return folder / name_of(manifest["step"])


class _Old:
    """A snapshot of the earlier version."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._ranks, self._aliases = path, manifest["ranks"], manifest["aliases"]
        whole: dict[str, Any] = {"stage": 0, "parameters": {}, "optimizer": None, "weights": None}
        self._sharding: dict[str, Any] = manifest["sharding"] or whole
        self._parts, self._stages = (self._sharding.get(name, 1) for name in ("tensor", "pipeline_stages"))
        self._whole: dict[str, TensorMetadata] = {}
        for name, known in self._sharding["parameters"].items():
            spec = TensorSpec(torch.Size(known["size"]), tuple(known["stride"]))
            how: Cut | None = None
            if known.get("cut") is not None and self._parts > 1:
                (dim, blocks), size = known["cut"], list(known["size"])
                how = Cut(dim, size[dim], blocks)
                size[dim] = how.length(self._parts, 0)
                spec = TensorSpec.of(torch.empty(size, device="meta"))
            self._whole[name] = TensorMetadata.of(getattr(torch, known["dtype"]), spec, how, self._parts)

    def states(self) -> list[SavedState]:
        """What its ranks would save now."""
        replicated, sharding = load_state(self._path / REPLICATED), self._sharding
        optimizer, ema = replicated.pop("optimizer"), replicated["ema"]
        if ema is not None:
            replicated["ema"] = {"n_averaged": ema["n_averaged"]}
        for name in ("epoch", "epoch_start"):  # of streams of samples, which no run has any more
            replicated.get("progress", {}).pop(name, None)
        states = []
        for rank in range(self._ranks):
            ranges: list[Range] = []
            own, values = load_state(self._path / rank_file(rank)), None
            if own["local"] is not None:
                raise Wrong(
                    "it is of local SGD, where ranks have weights of their own: end that run by the earlier version"
                )
            if rank == 0:
                model = TensorFile(self._path / "model.safetensors")
                ranges += [Range.of(f"weights/{name}", model.read(name)) for name in model.names()]
                stored = {each.name.removeprefix("weights/"): each.whole for each in ranges}
                self._whole = {**stored, **self._whole}
                for name, whole in self._whole.items():
                    if not whole.numel and name not in stored:  # in no shard
                        empty = torch.empty(0, dtype=whole.torch_dtype)
                        ranges.append(Range(f"weights/{name}", 0, 0, whole, empty))
            if sharding["weights"] is not None:
                weights = TensorFile(self._path / f"weights-{rank:05d}.safetensors")
                for piece in self._pieces(sharding["weights"][rank]):
                    ranges.append(self._range("weights", piece, weights.read(piece[0]), rank))
            if sharding["optimizer"] is not None:
                state = load_state(self._path / f"shard-{rank:05d}.pt")
                optimizer = optimizer or state
                values = self._optimizer(state, self._pieces(sharding["optimizer"][rank]), rank, ranges)
            elif rank == 0:
                names = [name for group in replicated["groups"] for name in group]
                given = {} if ema is None else ema["averages"]
                averages = {number: given[name] for number, name in enumerate(names) if name in given}
                whole_of = [(name, 0, self._whole[name].numel) for name in names]
                values = self._optimizer({**optimizer, "averages": averages}, whole_of, 0, ranges)
            number = rank % (self._ranks // self._stages)
            buffers = own.pop("buffers").items()
            ranges += [Range.of(f"buffers@{number}/{name}", buffer) for name, buffer in buffers]
            layout = Layout(stage=sharding["stage"], pipeline_stages=self._stages, tensor=self._parts)
            own["optimizer"] = values
            states.append(SavedState(replicated, own, ranges, self._aliases, layout))
        replicated["options"] = options_of(optimizer["param_groups"])
        return states

    @staticmethod
    def _pieces(shards: Sequence[Any]) -> list[tuple[str, int, int]]:
        listed = [list(shard.values()) if isinstance(shard, dict) else shard for shard in shards]
        return [(name, offset, offset + size) for name, offset, size in listed]

    def _range(self, kind: str, piece: tuple[str, int, int], values: Tensor, rank: int) -> Range:
        name, start, stop = piece
        whole = self._whole[name].model_copy(update={"dtype": str(values.dtype).removeprefix("torch.")})
        flat = whole.flatten(values) if values.dim() != 1 and whole.cut is None else values.reshape(-1)
        place = whole.place_of(rank % self._parts)[0]
        return Range(f"{kind}/{name}", place + start, place + stop, whole, flat)

    def _optimizer(
        self, state: Mapping[str, Any], pieces: Sequence[tuple[str, int, int]], rank: int, ranges: list[Range]
    ) -> dict[str, Any]:
        """The plain values of an optimizer; its tensors are added to the ranges."""
        plain: dict[str, dict[str, Any]] = {}
        for number, piece in enumerate(pieces):
            name, start, stop = piece
            shapes = torch.Size([stop - start]), torch.Size(self._whole[name].size)
            plain[name], found = divided(state["state"].get(number, {}), *shapes)
            ranges += [self._range(kind, piece, value, rank) for kind, value in found.items()]
        for kind, entry in (("master_weights", "master_weights"), ("average", "averages")):
            for number, values in state.get(entry, {}).items():
                ranges.append(self._range(kind, pieces[number], values, rank))
        bare = {key: value for key, value in state.items() if key not in ("master_weights", "averages")}
        return plain_values(bare, plain)
