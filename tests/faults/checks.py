"""Checks of a run's snapshots: whether they can be read, and whether two runs ended in the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from snapshot_files import read_snapshot
from torch import Tensor

from hvd_ckpt.app.training import logs
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError, name_of
from hvd_ckpt.snapshots.reader import open_snapshot
from hvd_ckpt.snapshots.schema import rank_file

REPLICATED = ("options", "scaler", "progress", "plan", "samples", "replicas", "logged")
PER_RANK = ("random",)
NAMED = 5  # differences of one kind that are named


def unreadable(run: Path, ranks: int) -> list[str]:
    """One sentence for each snapshot in place that some rank cannot read."""
    faults = []
    for path in sorted((run / "snapshots").glob("step-*"), reverse=True):
        try:
            for rank in range(ranks):
                read_snapshot(path, rank)
        except SnapshotError as error:
            faults.append(str(error))
    return faults


def newest_good(run: Path) -> int:
    """The step that a run resumes from; 0 if no snapshot can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = reader.find(run / "snapshots")
        except SnapshotError:
            return 0
    return 0 if found is None else found.manifest.step


def differences(run: Path, reference: Path, step: int, ranks: int | None) -> list[str]:
    """The differences, to the bit, between two runs in their snapshots of a step and in their logs.

    Args:
        ranks: of the job, in all stages and parts; None for logical replicas, which use no state of ranks and run on any number.
    """
    try:
        ours, theirs = (_state(folder, step, ranks) for folder in (run, reference))
        pairs = [
            differing(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])
        ]
        return [name for pair in (*pairs, _losses_differ(run, reference)) for name in _shortened(pair)]
    except (SnapshotError, ValueError) as error:
        return [str(error)]


def _snapshot(run: Path, step: int) -> Path:
    return run / "snapshots" / name_of(step)


def _state(run: Path, step: int, ranks: int | None) -> dict[str, Any]:
    """Everything in a snapshot that two equal runs have in common, by name."""
    path = _snapshot(run, step)
    first = read_snapshot(path, 0)
    state = {"weights": first.weights, **{name: first.replicated.get(name) for name in REPLICATED}}
    files = open_snapshot(path)
    shared = [name for name in files.manifest.tensors if not name.startswith(("buffers@", "weights/"))]
    state["tensors"] = dict(zip(shared, files.read(map(files.manifest.all_of, shared))))
    for rank in range(ranks or 0):
        if rank_file(rank) not in files.manifest.files:
            raise ValueError(f"rank {rank} has no state in '{path}'")
        own = files.state(rank_file(rank))
        state.update({f"rank {rank}'s {name}": own[name] for name in PER_RANK})
        buffers = [name for name in files.manifest.tensors if name.startswith(f"buffers@{rank}/")]
        state.update(zip(buffers, files.read(map(files.manifest.all_of, buffers))))
    return state


def differing(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """The names of the values that differ, by a single bit, between two states of dicts, lists, tensors and plain values."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        # As bytes: equal numbers may have other bits (0 and -0), and nan is not equal to itself.
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
        for number, (value, other) in enumerate(zip(ours, theirs)):
            yield from differing(f"{name}[{number}]", value, other)
    elif ours != theirs:
        yield name


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _losses_differ(run: Path, reference: Path) -> Iterator[str]:
    """The logged losses, with each step once and in order."""
    ours, theirs = (
        [
            (record["step"], record["loss"])
            for record in logs.read(folder / "log.jsonl")
            if record.get("kind") == "train"
        ]
        for folder in (run, reference)
    )
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        yield "the steps in the log"
    else:
        yield from (
            f"the loss of step {step} in the log"
            for (step, loss), (_, other) in zip(ours, theirs)
            if loss != other
        )


def _shortened(differences: Iterator[str]) -> list[str]:
    names = list(differences)
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more of these"]
