"""What a snapshot says of a run whose state is split over the ranks: which elements of which parameter each rank has written.

A *range* is a parameter's name with its first and last element + 1, in the order in which the elements lie in memory. It is in the
manifest, so that a job of another size finds the files with its own elements, and a tool the whole parameter, without a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.snapshots.tensor_file import dtype_called

__all__ = ["OwnShard", "Range", "Shards", "Whole", "names_of", "overlap", "parse_shards"]

Range = tuple[str, int, int]


@dataclass(frozen=True)
class Whole:
    """A parameter as it is when nothing is split.

    Attributes:
        shape: of it.
        order: its dimensions as they lie in memory, the one with the longest strides first; None where that is their own order.
        dtype: such as "float32".
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    dtype: str

    @classmethod
    def of(cls, parameter: Tensor) -> Whole:
        strides = parameter.stride()
        order = tuple(sorted(range(parameter.dim()), key=lambda dimension: -strides[dimension]))
        return cls(
            tuple(parameter.shape),
            None if parameter.is_contiguous() else order,
            str(parameter.dtype).removeprefix("torch."),
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def unflatten(self, flat: Tensor) -> Tensor:
        """Elements in memory order as the parameter; a view."""
        if self.order is None:
            return flat.view(self.shape)
        lying = flat.view([self.shape[dimension] for dimension in self.order])
        return lying.permute([self.order.index(dimension) for dimension in range(len(self.shape))])


@dataclass(frozen=True)
class Shards:
    """What the manifest of a sharded run's snapshot says.

    Attributes:
        stage: 1 to 3, as in :mod:`hvd_ckpt.sharding.sharding`.
        parameters: all of the model, by name; tied ones once.
        optimizer: by rank, the ranges that it has optimizer state of, in the order of that state.
        weights: by rank, the ranges whose exact weights it has; None where rank 0 has written whole ones.
    """

    stage: int
    parameters: dict[str, Whole]
    optimizer: tuple[tuple[Range, ...], ...]
    weights: tuple[tuple[Range, ...], ...] | None

    def plain(self) -> dict[str, Any]:
        """As JSON has it; :func:`parse_shards` takes it."""
        return {
            "stage": self.stage,
            "parameters": {
                name: {
                    "shape": list(whole.shape),
                    "order": None if whole.order is None else list(whole.order),
                    "dtype": whole.dtype,
                }
                for name, whole in self.parameters.items()
            },
            "optimizer": _plain(self.optimizer),
            "weights": None if self.weights is None else _plain(self.weights),
        }


@dataclass(frozen=True)
class OwnShard:
    """What a rank of a sharded run writes beside what is its own in any run.

    Attributes:
        stage: of the run.
        parameters: of the model.
        aliases: further names of tied parameters, and the name under which each is in ``parameters``.
        optimizer: its part of the state, ``optimizer.state_dict()``.
        weights: its exact weights, ``optimizer.weight_pieces()``; None where the model's own are exact and whole.
        averages: of its weights, by the number of the piece in that state; None where the run has none.
    """

    stage: int
    parameters: Mapping[str, Whole]
    aliases: Mapping[str, str]
    optimizer: Mapping[str, Any]
    weights: Sequence[tuple[str, int, int, Tensor]] | None
    averages: Mapping[int, Tensor] | None = None

    @property
    def ranges(self) -> dict[str, list[list[str | int]] | None]:
        """Of its optimizer state and its weights, as lists for JSON."""
        weights = self.weights
        return {
            "optimizer": [list(piece) for piece in self.optimizer["pieces"]],
            "weights": None if weights is None else [[name, start, stop] for name, start, stop, _ in weights],
        }

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state, without what the manifest says, and the averages."""
        kept = ("state", "param_groups", "master_weights")
        state = {name: self.optimizer[name] for name in kept if name in self.optimizer}
        return state if self.averages is None else {**state, "averages": dict(self.averages)}


def overlap(start: int, stop: int, others: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The elements, as start and stop, from the first to the last that are there and in any of the others too; start twice for
    none."""
    common = [(max(start, low), min(stop, high)) for low, high in others]
    common = [(low, high) for low, high in common if low < high]
    if not common:
        return start, start
    return min(low for low, _ in common), max(high for _, high in common)


def names_of(model: nn.Module) -> tuple[dict[str, Whole], dict[str, str]]:
    """A model's parameters, and the further names of those that are tied."""
    first: dict[int, str] = {}
    parameters: dict[str, Whole] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters[name] = Whole.of(parameter)
    return parameters, aliases


def parse_shards(value: Any, ranks: int) -> Shards:
    """What :meth:`Shards.plain` gave.

    Raises:
        Wrong: it cannot be of so many ranks; names what is wrong, without a way out.
    """
    keys = {"stage", "parameters", "optimizer", "weights"}
    if not isinstance(value, dict) or set(value) != keys:
        raise Wrong(f"shards must have {', '.join(sorted(keys))}")
    stage = value["stage"]
    if type(stage) is not int or not 1 <= stage <= 3:
        raise Wrong(f"shards.stage is {shown(stage)}, and must be 1, 2 or 3")
    if not isinstance(value["parameters"], dict):
        raise Wrong("shards.parameters must be an object")
    parameters = {name: _whole(one, name) for name, one in value["parameters"].items()}
    optimizer = _ranges(value["optimizer"], "optimizer", ranks, parameters)
    weights = None
    if value["weights"] is not None or stage == 3:
        weights = _ranges(value["weights"], "weights", ranks, parameters)
        split = {name for ranges in weights for name, _, _ in ranges}
        missing = [name for name, whole in parameters.items() if whole.numel and name not in split]
        if missing:
            raise Wrong(f"shards.weights have no part of {shown(missing[0])}")
    return Shards(stage, parameters, optimizer, weights)


def _plain(by_rank: Sequence[Sequence[Range]]) -> list[list[list[str | int]]]:
    return [[list(one) for one in ranges] for ranges in by_rank]


def _whole(value: Any, name: str) -> Whole:
    place = f"shards.parameters[{shown(name)}]"
    if not isinstance(value, dict) or set(value) != {"shape", "order", "dtype"}:
        raise Wrong(f"{place} must have shape, order and dtype")
    shape, order, dtype = value["shape"], value["order"], value["dtype"]
    if not isinstance(shape, list) or not all(type(one) is int and 0 <= one < 2**63 for one in shape):
        raise Wrong(f"{place}.shape is none")
    if order is not None and (
        not isinstance(order, list)
        or any(type(one) is not int for one in order)
        or sorted(order) != list(range(len(shape)))
    ):
        raise Wrong(f"{place}.order is none of its dimensions")
    if not isinstance(dtype, str) or dtype_called(dtype) is None:
        raise Wrong(f"{place}.dtype is {shown(dtype)}, which this version of PyTorch does not have")
    return Whole(tuple(shape), None if order is None else tuple(order), dtype)


def _ranges(
    value: Any, what: str, ranks: int, parameters: Mapping[str, Whole]
) -> tuple[tuple[Range, ...], ...]:
    """The ranges by rank; together those of a parameter must be all of it, each element once."""
    place = f"shards.{what}"
    if not isinstance(value, list) or len(value) != ranks or not all(isinstance(one, list) for one in value):
        raise Wrong(f"{place} must be {ranks} lists, one for each rank")
    found = tuple(tuple(_range(one, place, parameters) for one in ranges) for ranges in value)
    by_name: dict[str, list[tuple[int, int]]] = {}
    for ranges in found:
        if len({name for name, _, _ in ranges}) < len(ranges):
            raise Wrong(f"{place} have two ranges of a parameter on one rank")
        for name, start, stop in ranges:
            by_name.setdefault(name, []).append((start, stop))
    for name, spans in by_name.items():
        reached = 0
        for start, stop in sorted(spans):
            if start != reached:
                raise Wrong(f"{place} do not have each element of {shown(name)} once")
            reached = stop
        if reached != parameters[name].numel:
            raise Wrong(f"{place} do not have each element of {shown(name)} once")
    return found


def _range(value: Any, place: str, parameters: Mapping[str, Whole]) -> Range:
    if not isinstance(value, list) or len(value) != 3 or value[0].__class__ is not str:
        raise Wrong(f"{place} has a range that is none")
    name, start, stop = value
    if name not in parameters:
        raise Wrong(f"{place} has {shown(name)}, which is no parameter")
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= parameters[name].numel:
        raise Wrong(f"{place} has elements of {shown(name)} that it does not have")
    return name, start, stop
