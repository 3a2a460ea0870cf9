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

from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state_view import COUNTERS
from hvd_ckpt.snapshots.content import SavedState, complete, staged_content, write_content
from hvd_ckpt.snapshots.folder import (
    SnapshotError,
    discard,
    make_folder,
    name_of,
    reason_of,
    temporary_name,
)
from hvd_ckpt.snapshots.ranges import Range
from hvd_ckpt.snapshots.reader import naming
from hvd_ckpt.snapshots.schema import (
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    REPLICATED,
    FileEntry,
    Layout,
    TensorMetadata,
    hash_of,
    rank_file,
)
from hvd_ckpt.snapshots.tensors import TensorFile, hash_file, load_state
from hvd_ckpt.utils.cuts import Cut
from hvd_ckpt.utils.plain_data import loads
from hvd_ckpt.utils.schema import Wrong

Pieces = Sequence[tuple[str, int, int]]  # names, first and last + 1 element


def convert(old: Path, folder: Path) -> Path:
    """Writes a snapshot of the earlier version as one of this version; returns its path.

    Args:
        old: the snapshot.
        folder: folder of the new one, such as RUN/snapshots.

    Raises:
        SnapshotError: the snapshot is damaged or not of the earlier version, or cannot be written.
    """
    with naming(old, ""):
        content = (old / MANIFEST).read_bytes()
        manifest = loads(content, "give the folder of a snapshot", DAMAGED, MAX_MANIFEST_BYTES)
        if not isinstance(manifest, dict) or manifest.get("version") != 1:
            raise Wrong("it is not of the earlier version: use it as it is")
        if manifest.pop("sha256", None) != hash_of(manifest):
            raise Wrong(f"its manifest is not what was written (its SHA-256 differs): {DAMAGED}")
        for name, entry in manifest["files"].items():
            if Path(name).name != name or hash_file(old / name) != FileEntry(**entry):
                raise Wrong(f"{json.dumps(name)} is not what was written: {DAMAGED}")
        try:
            states = _Old(old, manifest).states()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Wrong(
                f"it is not what the earlier version writes ({type(error).__name__}: {error})"
            ) from None
    place = folder / name_of(manifest["step"])
    temporary = folder / temporary_name(place.name)
    try:
        make_folder(temporary)
        written = [
            write_content(temporary, rank, staged_content(rank, None, state))
            for rank, state in enumerate(states)
        ]
        fault = complete(temporary, manifest["step"], written, warnings.warn)
    except (OSError, Wrong) as error:
        discard(temporary)
        fault = reason_of(error)
    if fault is not None:
        raise SnapshotError(f"The snapshot '{old}' was not converted: {fault}.")
    return place


class _Old:
    """A snapshot of the earlier version."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._path, self._ranks, self._aliases = path, manifest["ranks"], manifest["aliases"]
        sharding = manifest["sharding"] or {"stage": 0, "parameters": {}, "optimizer": None, "weights": None}
        self._sharding, self._parts = sharding, sharding.get("tensor", 1)
        self._stages = sharding.get("pipeline_stages", 1)
        self._replicated = load_state(path / REPLICATED)
        self._whole: dict[str, TensorMetadata] = {}
        for name, known in sharding["parameters"].items():
            dtype, size, cut = getattr(torch, known["dtype"]), known["size"], known.get("cut")
            if cut is None or self._parts == 1:
                spec = TensorSpec(torch.Size(size), tuple(known["stride"]))
                self._whole[name] = TensorMetadata.of(dtype, spec)
            else:
                how = Cut(cut[0], size[cut[0]], cut[1])
                size = [*size[: cut[0]], how.length(self._parts, 0), *size[cut[0] + 1 :]]
                spec = TensorSpec.of(torch.empty(size, device="meta"))
                self._whole[name] = TensorMetadata.of(dtype, spec, how, self._parts)

    def states(self) -> list[SavedState]:
        """What its ranks would save now."""
        replicated, sharding = dict(self._replicated), self._sharding
        per_rank = [load_state(self._path / rank_file(rank)) for rank in range(self._ranks)]
        ranges: list[list[Range]] = [[] for _ in per_rank]
        model = TensorFile(self._path / "model.safetensors")
        for name in model.names():
            tensor = model.read(name)
            whole = TensorMetadata.of(tensor.dtype, TensorSpec.of(tensor))
            self._whole.setdefault(name, whole)
            ranges[0].append(Range(f"weights/{name}", 0, tensor.numel(), whole, tensor.reshape(-1)))
        optimizer, ema = replicated.pop("optimizer"), replicated["ema"]
        listed = [name for group in replicated["groups"] for name in group]
        if ema is not None:
            replicated["ema"] = {"n_averaged": ema["n_averaged"]}
        for rank, own in enumerate(per_rank):
            if own["local"] is not None:
                raise Wrong(
                    "it is of local SGD, where ranks have weights of their own: end that run by the earlier version"
                )
            values = None
            if sharding["weights"] is not None:
                weights = TensorFile(self._path / f"weights-{rank:05d}.safetensors")
                for piece in self._pieces(sharding["weights"][rank]):
                    ranges[rank].append(self._range("weights", piece, weights.read(piece[0]), rank))
            if sharding["optimizer"] is not None:
                pieces = self._pieces(sharding["optimizer"][rank])
                state = load_state(self._path / f"shard-{rank:05d}.pt")
                optimizer = optimizer or state
                values = self._optimizer(state, pieces, rank, ranges[rank])
            elif rank == 0:
                averages = {} if ema is None else dict(enumerate(map(ema["averages"].get, listed)))
                averages = {number: value for number, value in averages.items() if value is not None}
                whole_of = [(name, 0, self._whole[name].numel) for name in listed]
                values = self._optimizer({**optimizer, "averages": averages}, whole_of, 0, ranges[0])
            for name, buffer in own.pop("buffers").items():
                whole = TensorMetadata.of(buffer.dtype, TensorSpec.of(buffer))
                number = rank % (self._ranks // self._stages)
                flat = TensorSpec.of(buffer).flatten(buffer)
                ranges[rank].append(Range(f"buffers@{number}/{name}", 0, whole.numel, whole, flat))
            own["optimizer"] = values
        for name in sharding["parameters"] if sharding["weights"] is not None else ():
            whole = self._whole[name]
            if not whole.numel:  # in no shard
                ranges[0].append(
                    Range(f"weights/{name}", 0, 0, whole, torch.empty(0, dtype=whole.torch_dtype))
                )
        replicated["options"] = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer["param_groups"]
        ]
        layout = Layout(stage=sharding["stage"], pipeline_stages=self._stages, tensor=self._parts)
        return [
            SavedState(replicated, own, of_rank, self._aliases, layout)
            for own, of_rank in zip(per_rank, ranges)
        ]

    @staticmethod
    def _pieces(shards: Sequence[Any]) -> Pieces:
        listed = [list(shard.values()) if isinstance(shard, dict) else shard for shard in shards]
        return [(name, offset, offset + size) for name, offset, size in listed]

    def _range(self, kind: str, piece: tuple[str, int, int], values: Tensor, rank: int) -> Range:
        name, start, stop = piece
        whole = self._whole[name].model_copy(update={"dtype": str(values.dtype).removeprefix("torch.")})
        flat = whole.flatten(values) if values.dim() != 1 and whole.cut is None else values.reshape(-1)
        place = whole.place_of(rank % self._parts)[0]
        return Range(f"{kind}/{name}", place + start, place + stop, whole, flat)

    def _optimizer(
        self, state: Mapping[str, Any], pieces: Pieces, rank: int, ranges: list[Range]
    ) -> dict[str, Any]:
        """The plain values of an optimizer; its tensors are added to the ranges."""
        order = [number for group in state["param_groups"] for number in group["params"]]
        in_order = (
            dict(zip(order, pieces)) if self._sharding["optimizer"] is None else dict(enumerate(pieces))
        )
        plain: dict[str, dict[str, Any]] = {}
        for number, piece in in_order.items():
            name, start, stop = piece
            kept = plain.setdefault(name, {})
            shapes = (torch.Size([stop - start]), torch.Size(self._whole[name].size))
            for key, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.shape in shapes and key not in COUNTERS:
                    kept[key] = None
                    ranges.append(self._range(f"optimizer.{key}", piece, value, rank))
                else:
                    kept[key] = value
        for kind, entry in (("master_weights", "master_weights"), ("average", "averages")):
            for number, values in state.get(entry, {}).items():
                ranges.append(self._range(kind, pieces[number], values, rank))
        known = ("state", "param_groups", "master_weights", "averages")
        others = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        more = {key: value for key, value in state.items() if key not in known}
        return {"state": plain, "others": others, "more": more}
