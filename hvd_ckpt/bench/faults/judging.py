"""What the snapshots of a run are worth, and whether two runs came to the same, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.snapshots import snapshot
from hvd_ckpt.snapshots.snapshot_folder import list_snapshots, step_of
from hvd_ckpt.training import logs

__all__ = ["differences", "newest_good", "unreadable"]

COMMON = ("optimizer", "scaler", "progress", "plan", "samples")
FIRST = 5  # differences of one kind that are named


def unreadable(run: Path, ranks: int) -> list[str]:
    """Why snapshots that are in place cannot be read, one sentence for each; none in a sound run, however it was ended."""
    faults = []
    for path in list_snapshots(run / "snapshots"):
        try:
            for rank in range(ranks):
                snapshot.read(path, rank)
        except snapshot.SnapshotError as error:
            faults.append(str(error))
    return faults


def newest_good(run: Path) -> int:
    """The step that a run goes on from; 0 if it is the beginning, or nothing can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = snapshot.find(run / "snapshots")
        except snapshot.SnapshotError:
            return 0
    return 0 if found is None else step_of(found)


def differences(run: Path, reference: Path, step: int, ranks: int) -> list[str]:
    """What differs in the snapshots of a step of two runs, and in the losses of their logs; nothing if they are the same.

    Compared are, bit for bit, weights, the optimizer's and scaler's state, position in the data and plan, the random states and
    the buffers of each rank, and the logged losses, of each step once and in order.
    """
    folders = [folder / "snapshots" / f"step-{step:08d}" for folder in (run, reference)]
    found: list[str] = []
    try:
        for rank in range(ranks):
            ours, theirs = (snapshot.read(folder, rank) for folder in folders)
            if rank == 0:
                found += _some(_differing("weights", ours.weights, theirs.weights))
                for name in COMMON:
                    found += _some(_differing(name, ours.common[name], theirs.common[name]))
            if ours.own is None or theirs.own is None:
                found.append(f"rank {rank} has no part in the snapshot")
                continue
            for name in ("random", "buffers", "logged"):
                found += _some(_differing(f"rank {rank}'s {name}", ours.own[name], theirs.own[name]))
    except snapshot.SnapshotError as error:
        return [*found, str(error)]
    return [*found, *_logged(run, reference)]


def _some(found: Iterator[str]) -> list[str]:
    names = list(found)
    return names if len(names) <= FIRST else [*names[:FIRST], f"and {len(names) - FIRST} more of these"]


def _differing(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if not _same_bits(ours, theirs):
            yield name
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            yield f"{name}: its names"
        for key in ours.keys() & theirs.keys():
            yield from _differing(f"{name}.{key}", ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"{name}: its length"
        for number, (one, other) in enumerate(zip(ours, theirs)):
            yield from _differing(f"{name}[{number}]", one, other)
    elif ours != theirs:
        yield name


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return torch.equal(*as_bytes)


def _logged(run: Path, reference: Path) -> list[str]:
    try:
        ours, theirs = (_losses(folder) for folder in (run, reference))
    except ValueError as error:
        return [str(error)]
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        return ["the steps in the log"]
    differing = [str(step) for (step, loss), (_, other) in zip(ours, theirs) if loss != other]
    return [f"the loss of step {differing[0]} in the log"] if differing else []


def _losses(run: Path) -> list[tuple[int, float]]:
    records = logs.read(run / "log.jsonl")
    return [(record["step"], record["loss"]) for record in records if record.get("kind") == "train"]
