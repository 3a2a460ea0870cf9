"""Checks of a run's snapshots: whether they can be read, and whether two runs ended in the same bits."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.app.training import logs
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.schema import shard_file

REPLICATED = ("optimizer", "scaler", "progress", "plan", "samples", "replicas")
PER_RANK = ("random", "buffers", "logged")
FIRST = 5  # differences of one kind that are named


def unreadable(run: Path, ranks: int) -> list[str]:
    """One sentence for each snapshot in place that some rank cannot read."""
    faults = []
    for path in sorted((run / "snapshots").glob("step-*"), reverse=True):
        try:
            for rank in range(ranks):
                reader.read(path, rank)
        except SnapshotError as error:
            faults.append(str(error))
    return faults


def newest_good(run: Path) -> int:
    """The step that a run resumes from; 0 if there is no snapshot that can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = reader.find(run / "snapshots")
        except SnapshotError:
            return 0
    return 0 if found is None else int(found.name.removeprefix("step-"))


def digest(run: Path, step: int) -> str:
    """The start of the SHA-256 of the weights in a snapshot."""
    weights = run / "snapshots" / f"step-{step:08d}" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:12]


def differences(run: Path, reference: Path, step: int, ranks: int | None) -> list[str]:
    """The differences between two runs of so many ranks (on each pipeline stage) in their snapshots of a step and in their logs.

    Compared are, bit for bit, weights, the optimizer's and scaler's state, position in the data and plan, the state of logical
    replicas, each rank's random states and buffers, and the logged losses, with each step once and in order.

    Args:
        ranks: None for logical replicas on any numbers of ranks, which have no state of their own.
    """
    folders = [folder / "snapshots" / f"step-{step:08d}" for folder in (run, reference)]
    found: list[str] = []
    try:
        for rank in range(ranks or 1):
            ours, theirs = (reader.read(folder, rank) for folder in folders)
            if rank == 0:
                found += _some(differing("weights", ours.weights, theirs.weights))
                for name in REPLICATED:
                    found += _some(differing(name, ours.replicated.get(name), theirs.replicated.get(name)))
                found += _some(differing("shards", *map(_shards, (ours, theirs))))
            if ranks is None:
                break
            if not ours.per_stage or len(ours.per_stage) != len(theirs.per_stage):
                found.append(f"rank {rank} has no state in the snapshot, or of other stages")
            for own, other in zip(ours.per_stage, theirs.per_stage):
                for name in PER_RANK:
                    found += _some(differing(f"rank {rank}'s {name}", own[name], other[name]))
        return [*found, *_some(_losses_differ(run, reference))]
    except (SnapshotError, ValueError) as error:
        return [*found, str(error)]


def _shards(snapshot: reader.Snapshot) -> list[Any]:
    """The optimizer's state of each rank, where it is in shards."""
    if snapshot.sharding is None or snapshot.path is None:
        return []
    files = reader.open_snapshot(snapshot.path)
    return [files.state(shard_file(rank)) for rank in range(snapshot.ranks)]


def _some(found: Iterator[str]) -> list[str]:
    names = list(found)
    return names if len(names) <= FIRST else [*names[:FIRST], f"and {len(names) - FIRST} more of these"]


def differing(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """The names of the values that differ, by a single bit, between two states of dicts, lists, tensors and plain values."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not (same and torch.equal(_bytes(ours), _bytes(theirs))):
            yield name
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            yield f"{name}: its names"
        for key in ours.keys() & theirs.keys():
            yield from differing(f"{name}.{key}", ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"{name}: its length"
        for number, (one, other) in enumerate(zip(ours, theirs)):
            yield from differing(f"{name}[{number}]", one, other)
    elif ours != theirs:
        yield name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _losses_differ(run: Path, reference: Path) -> Iterator[str]:
    ours, theirs = (_losses(folder) for folder in (run, reference))
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        yield "the steps in the log"
    else:
        for (step, loss), (_, other) in zip(ours, theirs):
            if loss != other:
                yield f"the loss of step {step} in the log"


def _losses(run: Path) -> list[tuple[int, float]]:
    records = logs.read(run / "log.jsonl")
    return [(record["step"], record["loss"]) for record in records if record.get("kind") == "train"]
