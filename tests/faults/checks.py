"""Checks of a run's snapshots: whether they can be read, and whether two runs ended in the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same import same
from snapshot_files import read_snapshot

from hvd_ckpt.app.training import logs
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError, name_of
from hvd_ckpt.snapshots.schema import rank_file

REPLICATED = ("options", "scaler", "progress", "plan", "samples", "replicas", "logged")
NAMED = 9  # differences that are named


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
    """The differences, to the bit, between two runs in their snapshots of a step and in the losses of their logs.

    Args:
        ranks: of the job, in all stages and parts; None for logical replicas, which use no state of ranks and run on any number.
    """
    try:
        ours, theirs = (_state(folder, step, ranks) for folder in (run, reference))
    except (SnapshotError, KeyError) as error:
        return [str(error)]
    names = [name for key in ours for name in differing(key, ours[key], theirs.get(key))]
    names += [name for key in theirs if key not in ours for name in differing(key, None, theirs[key])]
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]


def _state(run: Path, step: int, ranks: int | None) -> dict[str, Any]:
    """Everything that two equal runs have in common, by name."""
    path = run / "snapshots" / name_of(step)
    first, files = read_snapshot(path, 0), reader.open_snapshot(path)
    numbers = range(ranks or 0)
    of_ranks = tuple(f"buffers@{rank}/" for rank in numbers)
    names = [name for name in files.manifest.tensors if not name.startswith("buffers@")]
    names += [name for name in files.manifest.tensors if name.startswith(of_ranks)]
    records = [record for record in logs.read(run / "log.jsonl") if record.get("kind") == "train"]
    logged = [(record["step"], record["loss"]) for record in records]
    return {
        **{name: first.replicated.get(name) for name in REPLICATED},
        **dict(zip(names, files.read(map(files.manifest.all_of, names)))),
        **{f"random state of rank {rank}": files.state(rank_file(rank))["random"] for rank in numbers},
        "steps in the log": str([step for step, _ in logged]),
        "losses": dict(logged),
    }


def differing(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """The names of the values that differ, by a single bit, between two states of dicts, lists, tensors and plain values."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            yield f"{name}: its names"
        for key in ours.keys() & theirs.keys():
            yield from differing(f"{name}.{key}", ours[key], theirs[key])
    elif not same(ours, theirs):
        yield name
