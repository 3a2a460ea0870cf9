"""Taking up the optimizer's state of a sharded run, by a job of any size and stage, sharded or not.

Each rank reads the parts in which elements of its own are, and keeps only these elements, so that no rank holds more than it will
have; every file that is read is checked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.snapshots import contents, structure
from hvd_ckpt.snapshots.hashed_file import DAMAGED, SnapshotError
from hvd_ckpt.snapshots.manifest import shard_name
from hvd_ckpt.snapshots.shards import Range, Shards, Whole, overlap
from hvd_ckpt.snapshots.snapshot import Snapshot
from hvd_ckpt.snapshots.snapshot_files import naming, opened
from hvd_ckpt.snapshots.tensor_file import Cut

__all__ = ["check_shards", "pairs_of", "read_parts", "state_of_pieces", "wanted_by"]

_FLAT = ("master_weights", "averages")  # one tensor for each piece; where a run has them


def wanted_by(optimizer: Any, model: nn.Module) -> dict[str, list[tuple[int, int]]]:
    """The elements, as start and stop, whose state this rank has, by parameter.

    Args:
        optimizer: a ``DistributedOptimizer``, sharded or not.
    """
    if not getattr(optimizer, "shard_stage", 0):
        return {name: [(0, parameter.numel())] for name, parameter in model.named_parameters()}
    found: dict[str, list[tuple[int, int]]] = {}
    for piece in optimizer.pieces:
        found.setdefault(piece.name, []).append((piece.start, piece.stop))
    return found


def read_parts(
    resumed: Snapshot,
    wanted: Mapping[str, Sequence[tuple[int, int]]],
    expected: Mapping[str, Mapping[str, Any]],
    groups: int,
) -> list[dict[str, Any]]:
    """The parts of a sharded run's optimizer state, as its ranks' ``state_dict()`` had them, cut to what is wanted.

    Args:
        resumed: with :attr:`~hvd_ckpt.snapshots.snapshot.Snapshot.shards`.
        wanted: elements, as start and stop, by parameter.
        expected: what :func:`state_of_pieces` gives.
        groups: parameter groups of the optimizer.

    Raises:
        SnapshotError: a part is damaged, no longer there, or not of such an optimizer.
    """
    shards, path = resumed.shards, resumed.path
    assert shards is not None and path is not None
    parts = []
    with opened(path) as files:
        if files.manifest != resumed.manifest:
            raise SnapshotError(
                f"The snapshot '{path}' has been written anew while it was read: resume again."
            )
        for rank in _ranks_with(shards, wanted):
            ranges, name = shards.optimizer[rank], shard_name(rank)
            part = files.tree(name, partial(_cut, ranges=ranges, wanted=wanted))
            narrow = [
                (parameter, *overlap(start, stop, wanted.get(parameter, ())))
                for parameter, start, stop in ranges
            ]
            with naming(path, name):
                try:
                    check_part(part, rank, narrow, expected, groups)
                except Wrong as error:
                    raise Wrong(f"{error}: {DAMAGED}, or give the settings that the run had") from None
            parts.append(_narrowed(part, narrow))
    return parts


def _ranks_with(shards: Shards, wanted: Mapping[str, Sequence[tuple[int, int]]]) -> list[int]:
    """The ranks that have something of it; rank 0 if none has, for its parameter groups."""
    found = [
        rank
        for rank, ranges in enumerate(shards.optimizer)
        if any(
            start < high and low < stop for name, start, stop in ranges for low, high in wanted.get(name, ())
        )
    ]
    return found or [0]


def _cut(document: Any, ranges: Sequence[Range], wanted: Mapping[str, Sequence[tuple[int, int]]]) -> Cut:
    """What is to be left of the tensors of a part, of which nothing is checked yet."""
    pieces: dict[str, int] = {}
    outer = document if isinstance(document, dict) else {}
    for number, kept in (pair for name in ("state", *_FLAT) for pair in pairs_of(outer.get(name))):
        for value in (kept, *kept.values()):
            name = value.get("$tensor") if isinstance(value, dict) else None
            if isinstance(name, str) and isinstance(number, int) and 0 <= number < len(ranges):
                pieces[name] = number

    def cut(name: str, shape: list[int]) -> tuple[int, int] | None:
        if name not in pieces:
            return None
        parameter, start, stop = ranges[pieces[name]]
        if shape != [stop - start]:
            return None
        low, high = overlap(start, stop, wanted.get(parameter, ()))
        return low - start, high - start

    return cut


def pairs_of(value: Any) -> Iterable[tuple[Any, dict[str, Any]]]:
    """The entries of a dict with numbers as keys, as :func:`hvd_ckpt.snapshots.tree.encode` writes it."""
    pairs = value.get("$dict") if isinstance(value, dict) else None
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict):
            yield pair[0], pair[1]


def _narrowed(part: dict[str, Any], ranges: Sequence[Range]) -> dict[str, Any]:
    """The part with what is left of its pieces."""
    left = {number for number, (_, start, stop) in enumerate(ranges) if start < stop}
    return {
        "state": {number: kept for number, kept in part["state"].items() if number in left},
        "param_groups": part["param_groups"],
        "pieces": [list(one) for one in ranges],
        **{
            name: {number: one for number, one in part.get(name, {}).items() if number in left}
            for name in _FLAT
        },
    }


def check_shards(shards: Shards, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises Wrong unless what was split over the ranks is the model's and the optimizer's: names, shapes, order in memory.

    Args:
        optimizer: as it was made, not yet the one that reduces.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    stored = {name for ranges in shards.optimizer for name, _, _ in ranges}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, here = names[parameter], Whole.of(parameter)
            there = shards.parameters.get(name)
            if there is None or (parameter.numel() and name not in stored):
                raise Wrong(
                    f"shards have no optimizer state of {shown(name)}: the snapshot is of another model"
                )
            if (there.shape, there.order) != (here.shape, here.order):
                raise Wrong(
                    f"shards.parameters[{shown(name)}] has the shape {list(there.shape)}, and must have {list(here.shape)} in the "
                    f"same order in memory: the snapshot is of another model"
                )


def state_of_pieces(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of a piece of each parameter once it has taken a step, for :func:`check_part`.

    Args:
        optimizer: as it was made, not yet the one that reduces.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = contents.after_a_step(optimizer, flat=True)
    return {names[parameter]: entries for parameter, entries in zip(parameters, kept)}


def check_part(
    part: Any,
    rank: int,
    ranges: Sequence[tuple[str, int, int]],
    expected: Mapping[str, Mapping[str, Any]],
    groups: int,
) -> None:
    """Raises Wrong unless it is a rank's part of the state of an optimizer that is split over the ranks.

    Args:
        ranges: that it is of, in its order.
        expected: what :func:`state_of_pieces` gives.
        groups: parameter groups of the optimizer.
    """
    place = f"shard {rank}"
    contents.check_state(part, place)
    numbers = [number for group in part["param_groups"] for number in group["params"]]
    if len(part["param_groups"]) != groups or sorted(numbers) != list(range(len(ranges))):
        raise Wrong(
            f"{place}.param_groups are not of the {len(ranges)} pieces that it has, in {groups} groups"
        )
    for number, kept in part["state"].items():
        name, start, stop = ranges[number]
        here = f"{place}.state[{number}]"
        for entry, value in expected.get(name, {}).items() if kept else ():
            if entry not in kept:
                raise Wrong(f"{here} has no {entry}, which this optimizer with its options needs")
            if isinstance(value, Tensor) and value.shape == (contents.FLAT,):
                value = torch.empty(stop - start, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor) and not contents.is_like(kept[entry], value):
                found, wanted = structure.described(kept[entry]), structure.described(value)
                raise Wrong(f"{here}.{entry} is {found}, and must be {wanted}")
    for entry in _FLAT:
        values = part.get(entry, {})
        structure.dictionary(values, f"{place}.{entry}")
        for number, value in values.items():
            if number not in range(len(ranges)) or not isinstance(value, Tensor):
                raise Wrong(f"{place}.{entry} has {structure.in_words(number)}, which is no piece's")
            _, start, stop = ranges[number]
            if value.shape != (stop - start,) or not value.is_floating_point():
                raise Wrong(
                    f"{place}.{entry}[{number}] is {structure.described(value)}, which is not its piece's"
                )
