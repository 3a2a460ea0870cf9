"""Conversion of a snapshot of an earlier version.

In version 1, each kind of state had a form of its own: the weights were in ``model.safetensors`` (whole) or
``weights-N.safetensors`` (shards), the optimizer's state in ``replicated.pt`` (whole) or ``shard-N.pt`` (shards). Version 2 has the
tensors of this one, and other plain values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

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
from hvd_ckpt.snapshots.reader import Snapshot, naming
from hvd_ckpt.snapshots.schema import (
    MANIFEST,
    FileEntry,
    Layout,
    Manifest,
    Range,
    TensorMetadata,
    document_of,
    rank_file,
    tensors_file,
)
from hvd_ckpt.snapshots.tensors import TensorFile
from hvd_ckpt.utils.schema import Wrong

WHOLE: dict[str, Any] = {"stage": 0, "parameters": {}, "optimizer": None, "weights": None}


def convert(old: Path, folder: Path) -> Path:
    """Writes a snapshot of an earlier version as one of this version into a folder, such as RUN/snapshots; returns its path.
    Raises SnapshotError if it is damaged or not of an earlier version, or cannot be written."""
    with naming(old):
        manifest = document_of((old / MANIFEST).read_bytes())
        if manifest.get("version") not in (1, 2):
            raise Wrong("it is not of an earlier version: use it as it is")
        try:
            place = folder / name_of(manifest["step"])
            if manifest["version"] == 2:
                states = _states(Snapshot(old, Manifest.of({**manifest, "version": 3})))
            else:
                files = {file: FileEntry(**entry) for file, entry in manifest["files"].items()}
                states = _states_of_1(Snapshot(old, Manifest.model_construct(files=files)), manifest)
        except SnapshotError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise Wrong(f"it is not what an earlier version writes ({reason})") from None
    temporary = folder / temporary_name(manifest["step"])
    try:
        make_folder(temporary)
        written = [
            write_content(temporary, rank, staged(rank, None, state)) for rank, state in enumerate(states)
        ]
        complete(temporary, manifest["step"], states[0], written, warnings.warn)
    except (OSError, Wrong) as error:
        discard(temporary)
        raise SnapshotError(f"The snapshot '{old}' was not converted: {reason_of(error)}.") from None
    return place


def _states(old: Snapshot) -> list[SavedState]:
    """What the ranks would save now, of version 2."""
    manifest, replicated = old.manifest, old.replicated
    owns = [old.state(rank_file(rank)) for rank in range(manifest.ranks)]
    _bring_up_to_date(replicated, owns, manifest.layout)
    states = []
    for rank, own in enumerate(owns):
        file = TensorFile(old.verified(tensors_file(rank)))
        ranges = [
            Range(name, *edges, manifest.tensors[name], file.read(name))
            for name, edges in manifest.ranges[rank].items()
        ]
        states.append(SavedState(replicated, own, ranges, manifest.aliases, manifest.layout))
    return states


def _bring_up_to_date(replicated: dict[str, Any], owns: Sequence[dict[str, Any]], layout: Layout) -> None:
    """Changes the plain values of all ranks from those of versions 1 and 2."""
    if any(own["local"] is not None for own in owns):
        raise Wrong(
            "it is of local SGD, where ranks have weights of their own: end that run by the earlier version"
        )
    if replicated["ema"] is not None:
        replicated["ema"] = replicated["ema"]["n_averaged"]
    replicated |= {"scheduler": None, "loop": {}, **replicated}
    position = replicated.pop("loader", None)  # in the data, of all ranks
    replicas = len(owns) // (layout.pipeline_stages * layout.tensor)
    # Of a run of hvd-ckpt train; the stages and parts of a replica have counted alike.
    logged = [
        row for own in owns[: replicas * layout.tensor : layout.tensor] for row in own.get("logged", ())
    ]
    if replicated.get("logged") is None and any("logged" in own for own in owns):
        replicated["logged"] = logged
    for own in owns:
        own.pop("logged", None)
        own["loader"] = own.get("loader") or position


def _states_of_1(old: Snapshot, manifest: Mapping[str, Any]) -> list[SavedState]:
    """What the ranks would save now, of version 1."""
    ranks, sharding = manifest["ranks"], manifest["sharding"] or WHOLE
    stages = sharding.get("pipeline_stages", 1)
    if sharding.get("tensor", 1) > 1:
        raise Wrong("it is of tensor parallelism: end that run by the earlier version")
    model = TensorFile(old.verified("model.safetensors"))
    weights = [Range.of(f"weights/{name}", model.read(name)) for name in model.names()]
    whole = {each.name.removeprefix("weights/"): each.whole for each in weights}
    for name, known in sharding["parameters"].items():
        spec = TensorSpec(torch.Size(known["size"]), tuple(known["stride"]))
        metadata = TensorMetadata.of(getattr(torch, known["dtype"]), spec)
        if not metadata.numel and name not in whole:  # in no shard
            empty = torch.empty(0, dtype=metadata.torch_dtype)
            weights.append(Range(f"weights/{name}", 0, 0, metadata, empty))
        whole[name] = metadata

    def ranges_of(found: Mapping[str, Any], piece: tuple[str, int, int]) -> Iterator[Range]:
        """Tensors of a piece of a parameter, by kind."""
        for kind, values in found.items():
            dtype = str(values.dtype).removeprefix("torch.")
            metadata = whole[piece[0]].model_copy(update={"dtype": dtype})
            flat = values if values.dim() == 1 else metadata.flatten(values)
            yield Range(f"{kind}/{piece[0]}", *piece[1:], metadata, flat)

    def pieces_of(kind: str, rank: int) -> list[tuple[str, int, int]]:
        shards = (shard.values() if isinstance(shard, dict) else shard for shard in sharding[kind][rank])
        return [(name, offset, offset + size) for name, offset, size in shards]

    replicated = old.replicated
    optimizer, ema = replicated.pop("optimizer"), replicated["ema"] or {"averages": {}}
    for name in ("epoch", "epoch_start"):  # of streams of samples, which no run has any more
        replicated.get("progress", {}).pop(name, None)
    layout = Layout(stage=sharding["stage"], pipeline_stages=stages)
    owns = [old.state(rank_file(rank)) for rank in range(ranks)]
    _bring_up_to_date(replicated, owns, layout)
    states = []
    for rank, own in enumerate(owns):
        ranges = weights if rank == 0 else list[Range]()
        if sharding["weights"] is not None:
            shards = TensorFile(old.verified(f"weights-{rank:05d}.safetensors"))
            for piece in pieces_of("weights", rank):
                ranges += ranges_of({"weights": shards.read(piece[0])}, piece)
        pieces: Sequence[tuple[str, int, int]] = ()
        own["optimizer"], state = None, None
        if sharding["optimizer"] is not None:
            state, pieces = old.state(f"shard-{rank:05d}.pt"), pieces_of("optimizer", rank)
            optimizer = optimizer or state
        elif rank == 0:
            names = [name for group in replicated["groups"] for name in group]
            averages = {number: ema["averages"].get(name) for number, name in enumerate(names)}
            state = {**optimizer, "averages": averages}
            pieces = [(name, 0, whole[name].numel) for name in names]
        if state is not None:
            plain = {}
            for number, piece in enumerate(pieces):
                shapes = torch.Size([piece[2] - piece[1]]), torch.Size(whole[piece[0]].size)
                plain[piece[0]], found = divided(state["state"].get(number, {}), *shapes)
                for kind, entry in (("master_weights", "master_weights"), ("average", "averages")):
                    if state.get(entry, {}).get(number) is not None:
                        found[kind] = state[entry][number]
                ranges += ranges_of(found, piece)
            bare = {key: value for key, value in state.items() if key not in ("master_weights", "averages")}
            own["optimizer"] = plain_values(bare, plain)
        buffers = own.pop("buffers").items()
        ranges += [Range.of(f"buffers@{rank % (ranks // stages)}/{name}", buffer) for name, buffer in buffers]
        states.append(SavedState(replicated, own, ranges, manifest["aliases"], layout))
    replicated["options"] = options_of(optimizer["param_groups"])
    return states
