"""The optimizer's state in parts: what one rank has, and how another job of any size or stage takes it up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch import mpi_ops

from hvd_ckpt.reduction.agreement import allgather_objects, raise_together
from hvd_ckpt.reduction.communicator import wait
from hvd_ckpt.sharding.layout import Form, key
from hvd_ckpt.sharding.sharding import Sharding

if TYPE_CHECKING:
    from hvd_ckpt.reduction.optimizer import ReducedOptimizer
    from hvd_ckpt.sharding.optimizer import ShardedOptimizer

__all__ = ["assembled", "load_parts", "targets_of"]

COUNTERS = (
    "step",
    "eta",
    "mu",
    "mu_product",
)  # state of torch.optim's classes that is not of a parameter's elements


def own_part(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """See ``ShardedOptimizer.state_dict``."""
    own = {id(piece.parameter) for piece in optimizer.pieces}
    for parameter in [one for one, values in optimizer.state.items() if not values and id(one) not in own]:
        del optimizer.state[parameter]  # somebody has asked for the state of a parameter of the model
    part: dict[str, Any] = optimizer._wrapped_class.state_dict(optimizer)
    part["pieces"] = key(optimizer.pieces)
    part["stage"] = optimizer.shard_stage
    part["ranks"] = optimizer._sharding.exchange.ranks
    part["rank"] = optimizer._sharding.exchange.rank
    masters = {
        number: piece.parameter.detach() for number, piece in enumerate(optimizer.pieces) if piece.has_master
    }
    if masters:
        part["master_weights"] = masters
    return part


def load(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """See ``ShardedOptimizer.load_state_dict``."""
    if "pieces" not in state:
        load_parts(optimizer, [state])
        return
    mine = key(optimizer.pieces)
    theirs = [list(piece) for piece in state["pieces"]]
    error = None
    if theirs != mine:
        error = ValueError(
            f"this state is the part of rank {state.get('rank')} of {state.get('ranks')} at stage {state.get('stage')}, and the "
            f"pieces of this rank are others; give hvd_ckpt.sharding.state.load_parts the parts of all ranks"
        )
    _load(optimizer, state, error)


def load_parts(optimizer: ReducedOptimizer, parts: Sequence[Mapping[str, Any]]) -> None:
    """Takes up the state of a job of any size and stage, sharded or not; drops all gradients. Collective, where it is sharded.

    Args:
        optimizer: a ``DistributedOptimizer``, sharded or not.
        parts: the ``state_dict()`` of every rank of that job; of a job that was not sharded, of one rank. Their tensors are only
            read where this rank's pieces are, so they may be mapped from files.

    Raises:
        ValueError: the parts do not cover a rank's pieces, or are of an optimizer with other parameter groups; on every rank.
    """
    error: Exception | None = None
    merged: dict[str, Any] = {}
    try:
        merged = _merged(optimizer, parts)
    except Exception as exception:  # whatever it is, the other ranks must hear of it
        error = exception
    if hasattr(optimizer, "_sharding"):
        _load(optimizer, merged, error)
        if optimizer._reducer is not None:
            optimizer._begin_anew()
    elif error is not None:
        raise error
    else:
        optimizer.load_state_dict(merged)


def _merged(optimizer: ReducedOptimizer, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of this rank's pieces, or of the whole parameters of an optimizer that is not sharded."""
    targets = targets_of(optimizer)
    sources = _Sources(parts, _names(optimizer))
    if sources.empty:
        state: dict[int, dict[str, Any]] = {}
    else:
        state = {
            number: found
            for number, target in enumerate(targets)
            if (found := sources.state_of(target)) is not None
        }
    groups = parts[0]["param_groups"]
    own_groups = optimizer.param_groups
    if len(groups) != len(own_groups):
        raise ValueError(
            f"the state has {len(groups)} parameter groups and this optimizer {len(own_groups)}; build the same optimizer"
        )
    counter = itertools.count()
    merged: dict[str, Any] = {
        "state": state,
        "param_groups": [
            {**group, "params": [next(counter) for _ in own["params"]]}
            for group, own in zip(groups, own_groups)
        ],
    }
    masters = sources.masters(targets)
    if masters:
        merged["master_weights"] = masters
    return merged


def full(optimizer: ShardedOptimizer, all_ranks: bool) -> dict[str, Any] | None:
    """See ``ShardedOptimizer.full_state_dict``."""
    sharding = optimizer._sharding
    part = own_part(optimizer)
    outline = {
        number: {
            name: (value.dtype, tuple(value.shape)) if _is_split(value, piece) else value
            for name, value in part["state"].get(number, {}).items()
        }
        for number, piece in enumerate(optimizer.pieces)
    }
    rank_here, members = sharding.exchange.rank, optimizer._process_set
    name = f"hvd_ckpt.{optimizer._identity}.state"
    outlines = allgather_objects((part["pieces"], outline), members, f"{name}.outline")
    parts: list[dict[str, Any]] = []
    for rank, (pieces, found) in enumerate(outlines):
        values: dict[int, dict[str, Any]] = {}
        for number, entries in found.items():
            for entry_name, entry in entries.items():
                if not _is_outline(entry):
                    values.setdefault(number, {})[entry_name] = entry
                    continue
                mine = part["state"][number][entry_name] if rank == rank_here else None
                value = _broadcast(mine, entry, rank, members, f"{name}.{rank}.{number}.{entry_name}")
                if all_ranks or rank_here == 0:
                    values.setdefault(number, {})[entry_name] = value
        parts.append({"pieces": pieces, "state": values})
    if rank_here != 0 and not all_ranks:
        return None
    index_of = {id(parameter): number for number, parameter in enumerate(sharding.layout.parameters)}
    whole = [index_of[id(parameter)] for parameter in itertools.chain.from_iterable(sharding.groups)]
    targets = [
        _Target(sharding.layout.names[index], 0, sharding.forms[index].numel, sharding.forms[index], True)
        for index in whole
    ]
    sources = _Sources(parts, [])
    state = {
        number: found
        for number, target in enumerate(targets)
        if (found := sources.state_of(target)) is not None
    }
    counter = itertools.count()
    groups = [
        {**group, "params": [next(counter) for _ in parameters]}
        for group, parameters in zip(part["param_groups"], sharding.groups)
    ]
    return {"state": state, "param_groups": groups}


def weight_pieces(sharding: Sharding) -> list[tuple[str, int, int, torch.Tensor]]:
    """See ``ShardedOptimizer.weight_pieces``."""
    return [
        (
            sharding.layout.names[span.parameter],
            span.start,
            span.stop,
            sharding.store.shards[group.position][span.offset : span.offset + span.numel],
        )
        for group in sharding.layout.groups
        for span in group.spans(sharding.exchange.rank)
    ]


def load_weight_pieces(
    optimizer: ShardedOptimizer, parts: Iterable[tuple[str, int, int, torch.Tensor]]
) -> None:
    """See ``ShardedOptimizer.load_weight_pieces``."""
    sharding = optimizer._sharding
    by_name: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for name, start, stop, values in parts:
        by_name.setdefault(name, []).append((start, stop, values))
    with torch.no_grad():
        for name, start, stop, own in weight_pieces(sharding):
            own.copy_(assembled(by_name.get(name, []), start, stop, f"the weights of '{name}'", own))
    sharding.masters.follow(sharding.store.shards)
    sharding.store.publish(sharding.layout.groups)


def _load(optimizer: Any, state: Mapping[str, Any], error: Exception | None) -> None:
    """Loads a state of this rank's pieces, or raises on all ranks, where one could not make it up."""
    sharding: Sharding = optimizer._sharding
    extra = ("pieces", "stage", "ranks", "rank", "master_weights")
    bare = {name: value for name, value in state.items() if name not in extra}
    groups = optimizer.param_groups
    if error is None:
        try:
            optimizer._wrapped_class.load_state_dict(optimizer, bare)
        except Exception as exception:  # whatever it is, the other ranks must hear of it
            error = exception
    raise_together(error, optimizer._process_set, f"hvd_ckpt.{optimizer._identity}.load")
    for group, loaded in zip(groups, optimizer.param_groups):  # a schedule may hold these very groups
        group.update(loaded)
    optimizer.param_groups = groups
    with torch.no_grad():
        for number, master in state.get("master_weights", {}).items():
            piece = sharding.pieces[number]
            if piece.has_master:
                piece.parameter.copy_(master)
                piece.weights.copy_(master)
    if sharding.offload is not None:
        sharding.offload.adopt(optimizer)
    if sharding.masters.by_group:  # on every rank alike: one may have no piece of a small group
        sharding.store.publish(sharding.layout.groups)


@dataclass(frozen=True)
class _Target:
    """What a state is wanted for: elements of a parameter; ``whole``: with the parameter's shape."""

    name: str
    start: int
    stop: int
    form: Form
    whole: bool


def targets_of(optimizer: Any) -> list[_Target]:
    """What an optimizer, sharded or not, has state of, in the order of its parameters."""
    if hasattr(optimizer, "_sharding"):
        return [_Target(piece.name, piece.start, piece.stop, piece.form, False) for piece in optimizer.pieces]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        _Target(name, 0, parameter.numel(), Form.of(parameter), True)
        for name, parameter in zip(_names(optimizer), parameters)
    ]


def _names(optimizer: Any) -> list[str]:
    """Of the whole parameters, in the order of the groups."""
    if hasattr(optimizer, "_sharding"):
        parameters: Iterable[torch.Tensor] = itertools.chain.from_iterable(optimizer._sharding.groups)
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [optimizer._parameter_names[parameter] for parameter in parameters]


class _Sources:
    """States of pieces or of whole parameters, found by name."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        self._found: dict[str, list[tuple[int, int | None, dict[str, Any]]]] = {}
        self._masters: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
        self.empty = not any(part["state"] for part in parts)
        for part in parts:
            pieces = part.get("pieces")
            if pieces is None and sum(len(group["params"]) for group in part["param_groups"]) != len(names):
                raise ValueError(
                    f"the state is of {sum(len(group['params']) for group in part['param_groups'])} parameters and this "
                    f"optimizer has {len(names)}; build the same optimizer"
                )
            for number, values in part["state"].items():
                if pieces is None:
                    self._found.setdefault(names[number], []).append((0, None, values))
                else:
                    name, start, stop = pieces[number]
                    self._found.setdefault(name, []).append((start, stop, values))
            for number, master in part.get("master_weights", {}).items():
                name, start, stop = part["pieces"][number]
                self._masters.setdefault(name, []).append((start, stop, master))

    def state_of(self, target: _Target) -> dict[str, Any] | None:
        """The state of a target, or None if its parameter has none."""
        found = self._found.get(target.name)
        if found is None or target.start == target.stop:
            return None
        return {name: self._value(target, name, found) for name in found[0][2]}

    def _value(
        self, target: _Target, name: str, found: Sequence[tuple[int, int | None, dict[str, Any]]]
    ) -> Any:
        first = found[0][2][name]
        start, stop, _ = found[0]
        length = target.form.numel if stop is None else stop - start
        if not isinstance(first, torch.Tensor):
            return first
        element = stop is None and target.form.shape == () and name not in COUNTERS
        if (first.dim() == 0 and not element) or (first.numel() == 1 and length != 1):
            return first.clone()
        if first.numel() != length:
            raise ValueError(
                f"{name} of '{target.name}' in the state has {first.numel()} elements and not {length}; it is of another model"
            )
        parts = [
            (
                start,
                target.form.numel if stop is None else stop,
                target.form.flatten(values[name]) if stop is None else values[name],
            )
            for start, stop, values in found
        ]
        like = torch.empty(0, dtype=first.dtype, device=first.device)
        flat = assembled(parts, target.start, target.stop, f"{name} of '{target.name}'", like)
        return target.form.unflatten(flat) if target.whole else flat

    def masters(self, targets: Sequence[_Target]) -> dict[int, torch.Tensor]:
        """The master weights of the targets that have any."""
        masters = {}
        for number, target in enumerate(targets):
            parts = self._masters.get(target.name)
            if parts:
                what = f"the master weights of '{target.name}'"
                masters[number] = assembled(parts, target.start, target.stop, what, parts[0][2])
        return masters


def assembled(
    parts: Sequence[tuple[int, int, torch.Tensor]], start: int, stop: int, what: str, like: torch.Tensor
) -> torch.Tensor:
    """Elements ``start`` to ``stop``, from parts that overlap them."""
    result = torch.empty(stop - start, dtype=like.dtype, device=like.device)
    reached = start
    for first, last, values in sorted(parts, key=lambda part: part[0]):
        low, high = max(first, reached), min(last, stop)
        if low > reached or low >= high:
            continue
        result[low - start : high - start].copy_(values.reshape(-1)[low - first : high - first])
        reached = high
    if reached < stop:
        raise ValueError(
            f"{what}: elements {reached} to {stop} are in none of the parts; give those of all ranks"
        )
    return result


def _broadcast(
    mine: torch.Tensor | None,
    outline: tuple[torch.dtype, tuple[int, ...]],
    rank: int,
    members: Any,
    name: str,
) -> torch.Tensor:
    """One rank's tensor, on the CPU; ``rank`` counts within the process set."""
    dtype, shape = outline
    value = torch.empty(shape, dtype=dtype) if mine is None else mine.detach().cpu().contiguous().clone()
    root = members.ranks[rank] if members.ranks else rank
    handle = mpi_ops.broadcast_async_(value.view(-1).view(torch.uint8), root, name=name, process_set=members)
    wait(handle, name)
    return value


def _is_split(value: Any, piece: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == piece.stop - piece.start


def _is_outline(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], torch.dtype)
