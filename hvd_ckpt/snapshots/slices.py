"""Slices of tensor parallelism in snapshots: loads a snapshot of any number of parts into one part.

A snapshot describes whole parameters, and how each is cut. If it has as many parts as this job, a part reads its own slices.
Otherwise whole tensors are put together, one parameter at a time, and cut again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.sharding.state import ShardRange, assembled
from hvd_ckpt.sharding.state_view import COUNTERS
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import ShardingMetadata, ShardMetadata, TensorMetadata
from hvd_ckpt.utils.cuts import Cut, cut_of
from hvd_ckpt.utils.schema import Wrong, shown

Piece = tuple[int, int, int, Tensor]  # part, first and last + 1 element of its slice, values


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """The cuts of the model's parameters, under all their names; empty without tensor parallelism."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: cut for name, parameter in named if (cut := cut_of(parameter)) is not None}


def sliced(snapshot: Snapshot, model: nn.Module) -> Snapshot:
    """The snapshot with this part's slices in place of the whole tensors that it has, of weights, averages and optimizer state.

    Raises:
        Wrong: a size is not that of the whole model, or the ranks have weights of their own.
    """
    cuts, grid = cuts_of(model), current()
    if not cuts:
        return snapshot
    replicated, whole = dict(snapshot.replicated), snapshot.weight_specs

    def own(name: str, value: Any) -> Any:
        if name not in cuts or not isinstance(value, Tensor) or value.shape != whole[name].shape:
            return value
        return cuts[name].of(value, grid.tensor, grid.part)

    for name in cuts.keys() & whole.keys():
        cut, size = cuts[name], list(whole[name].shape)
        if cut.dim >= len(size) or size[cut.dim] != cut.size:
            raise Wrong(
                f"weights[{shown(name)}] has size {size}, and must have {cut.size} in dimension {cut.dim}"
            )
    if any(own_state["local"] is not None for own_state in snapshot.per_stage):
        raise Wrong("it is of a run of LocalSGD, which tensor parallelism does not know")
    if (state := replicated["optimizer"]) is not None:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [name for group in replicated.get("groups", ()) for name in group]
        if len(names) != len(numbers):
            raise Wrong("it does not name the parameters of its optimizer, so their state cannot be cut")
        of = dict(zip(numbers, names))
        entries = {
            number: {
                key: own(of[number], value) if key not in COUNTERS else value for key, value in kept.items()
            }
            for number, kept in state["state"].items()
        }
        replicated["optimizer"] = {**state, "state": entries}
    ema = replicated["ema"]
    if ema is not None and ema["averages"] is not None:
        averages = {name: own(name, value) for name, value in ema["averages"].items()}
        replicated["ema"] = {**ema, "averages": averages}
    return dataclasses.replace(snapshot, cuts=cuts, replicated=replicated)


def local_spec(there: TensorMetadata, cut: Cut | None) -> TensorSpec:
    """Shape and strides that this part has of a parameter, of which the snapshot has ``there``."""
    grid = current()
    if cut is None:
        return there.spec
    return there.model_copy(update={"cut": (cut.dim, cut.blocks)}).spec_of(grid.tensor, grid.part)


class Slices:
    """The shards of a snapshot that this part reads, and those that are cut again.

    Args:
        sharding: sharding of the snapshot.
        cuts: cuts of the parameters here, by the names that they have there.
    """

    def __init__(self, sharding: ShardingMetadata, cuts: Mapping[str, Cut]) -> None:
        self._sharding, self._cuts = sharding, cuts
        # By the name of each parameter that is cut anew, for each of its shards: part, first and last
        # + 1 element, number in the state of its rank, and that state.
        self._found: dict[str, list[tuple[int, int, int, int, Mapping[str, Any]]]] = {}

    def is_cut_anew(self, name: str) -> bool:
        """Whether the slices of a parameter there are others than here."""
        there, here = self._sharding.parameters[name].how, self._cuts.get(name)
        if there is None and here is None:
            return False
        return there != here or self._sharding.tensor != current().tensor

    def is_own(self, name: str, rank: int) -> bool:
        """Whether a rank's shard of a parameter is of this part's slice, as it is here."""
        if self.is_cut_anew(name):
            return False
        return self._sharding.parameters[name].how is None or rank % self._sharding.tensor == current().part

    def takes(self, shard: ShardMetadata, rank: int, elements: ShardRange) -> bool:
        """Whether these elements of this part come from a rank's shard: all shards of a parameter that is cut again do."""
        return self.is_cut_anew(shard.name) or (self.is_own(shard.name, rank) and shard.overlaps(elements))

    def note(self, rank: int, part: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[list[Any]]:
        """The pieces of a rank's state: names, first and last + 1 elements. Those of other parts have no name; what is cut again
        is kept for :meth:`cut_anew`."""
        pieces = []
        for number, shard in enumerate(self._sharding.optimizer[rank]):
            name = shard.name
            if name in wanted and self.is_cut_anew(name):
                of_part = rank % self._sharding.tensor
                self._found.setdefault(name, []).append((of_part, shard.offset, shard.stop, number, part))
            pieces.append([name if self.is_own(name, rank) else "", shard.offset, shard.stop])
        return pieces

    def cut_anew(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """State of this part's slices, in the form of a rank's; None where nothing is cut again."""
        if not self._found:
            return None
        made: dict[str, Any] = {"state": {}, "param_groups": groups, "pieces": []}
        for number, (name, shards) in enumerate(self._found.items()):
            numel = local_spec(self._sharding.parameters[name], self._cuts.get(name)).numel
            made["pieces"].append([name, 0, numel])
            # All shards of a parameter have the same entries. Those that are not of elements, such as a count
            # of steps, are taken from the first.
            _, first, last, there, part = shards[0]
            kept = {}
            for key, value in part["state"].get(there, {}).items():
                is_element = (
                    isinstance(value, Tensor) and value.shape == (last - first,) and key not in COUNTERS
                )
                if is_element:
                    pieces = [(p, a, b, state["state"][n][key]) for p, a, b, n, state in shards]
                    value = self._flat(name, pieces)
                kept[key] = value
            if kept:
                made["state"][number] = kept
            for entry in ("master_weights", "averages"):
                if there in part.get(entry, {}):
                    pieces = [(p, a, b, state[entry][n]) for p, a, b, n, state in shards]
                    made.setdefault(entry, {})[number] = self._flat(name, pieces)
        return made

    def _flat(self, name: str, pieces: Sequence[Piece]) -> Tensor:
        spec = local_spec(self._sharding.parameters[name], self._cuts.get(name))
        return spec.flatten(self.whole(name, pieces))

    def whole(self, name: str, pieces: Sequence[Piece]) -> Tensor:
        """This part's slice of a parameter, or all of one that is not cut, from the elements of all slices there."""
        there, cut, grid = self._sharding.parameters[name], self._cuts.get(name), current()
        count = 1 if there.how is None else self._sharding.tensor
        slices = []
        for part in range(count):
            spec = there.spec_of(self._sharding.tensor, part)
            own = [(a, b, values) for p, a, b, values in pieces if p == part or count == 1]
            flat = assembled(own, 0, math.prod(spec.shape), f"the state of '{name}'", own[0][2])
            slices.append(spec.unflatten(flat))
        whole = slices[0] if there.how is None else there.how.whole(slices)
        return whole if cut is None else cut.of(whole, grid.tensor, grid.part)
