"""Whether a snapshot can be used: the schema of its plain values, and its comparison with the model and optimizer that resume.

Hashes show that a snapshot is undamaged, but not that it belongs to this model. PyTorch loads the state of another model or
optimizer, and fails in the next step. So names and shapes are compared before anything is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from hvd_ckpt.distributed.replicas import ReplicasState
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.state import GradientsState, ReducerState, parts_of
from hvd_ckpt.sharding.state import state_after_a_step
from hvd_ckpt.snapshots.model import EXTRA, ModelTensors, check_split, own_buffers
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import OTHER_MODEL, Range, TensorMetadata, rank_file
from hvd_ckpt.utils.schema import Wrong, first_error, shown
from hvd_ckpt.utils.states import NUMBER, Count, Positive, State, described, is_number, is_single

S = TypeVar("S", bound=State)
R = TypeVar("R", bound="ReplicatedState")

# ------------------------------------------------------------------------------------ plain values


class Scaler(State):
    """The state of a gradient scaler."""

    scale: Annotated[float, Field(gt=0), NUMBER]
    growth_factor: Annotated[float, Field(gt=1), NUMBER]
    backoff_factor: Annotated[float, Field(gt=0, le=1), NUMBER]
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)]
    growth_tracker: Annotated[int, Field(ge=0, lt=2**31, alias="_growth_tracker")]


class Apart(State):
    """State of a rank that has weights of its own between averages: its loss scale, its elements, and the averages under way."""

    scaler: Scaler | None
    elements: list[tuple[str, Count, Count]]
    averages: dict[str, Any]


class OptimizerValues(State):
    """What an optimizer keeps besides tensors of a parameter's elements."""

    # Of each parameter, by name; None for an entry that is a tensor of the snapshot.
    state: dict[str, dict[str, Any]]
    others: dict[Any, Any]  # of no parameter
    more: dict[str, Any]  # further entries of its state_dict()


class ReplicatedState(State):
    """Plain values that are the same on every rank.

    ``kinds``: the names of the classes of optimizer and scheduler, and the kind of the loader; ``groups``: the names of the
    parameters in each group, and ``options``: their options. ``ema``: the updates of the average. ``mid_period``: the ranks have
    weights of their own. ``scheduler`` and ``loop`` are those of a loop of one's own.
    """

    kinds: dict[str, str | None] = Field(default_factory=dict)
    groups: list[list[str]]
    options: list[dict[str, Any]]
    ema: Count | None
    scaler: Scaler | None
    threads: Positive
    device: str
    replicas: ReplicasState | None
    extra: dict[str, Any] = Field(default_factory=dict)  # rank 0's
    mid_period: bool
    scheduler: dict[str, Any] | None
    loop: dict[str, Any]

    @model_validator(mode="after")
    def _has_options_of_its_groups(self) -> ReplicatedState:
        names = [name for group in self.groups for name in group]
        if not self.groups or len(self.groups) != len(self.options) or len(set(names)) < len(names):
            raise ValueError("groups and options are not of groups that have each parameter once")
        return self


class PerRankState(State):
    """State of one rank; a reducer of sharded gradients validates its ``reduction`` itself."""

    random: dict[str, Any]
    reduction: dict[str, Any]
    optimizer: OptimizerValues | None
    extra: dict[str, Any] = Field(default_factory=dict)  # of modules, from get_extra_state()
    local: Apart | None
    loader: dict[str, Any] | None


def check_state(snapshot: Snapshot, replicated: type[R], per_rank: type[PerRankState]) -> R:
    """The replicated state. Raises Wrong unless it and the per-rank state have these schemas; names the first wrong entry."""
    checked = validated(replicated, snapshot.replicated, "replicated")
    if snapshot.has_own:
        of_rank = validated(per_rank, snapshot.per_rank, "per_rank")
        gradients, learned = parts_of(of_rank.reduction)
        validated(GradientsState, gradients, "per_rank.reduction")
        if learned and snapshot.manifest.layout.stage < 2:
            validated(ReducerState, learned, "per_rank.reduction")
    return checked


class _OfRank(State):
    """What another rank's file must have."""

    model_config = ConfigDict(extra="ignore")

    optimizer: OptimizerValues | None


def validated(schema: type[S], value: Any, place: str) -> S:
    """The value. Raises Wrong unless it has the schema."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise Wrong(f"{place}: {first_error(error)}") from None


# ------------------------------------------------------------------------------------ model and optimizer


def check_fits(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises SnapshotError unless weights, buffers and optimizer state are of this model and optimizer (distributed or not), by
    names and shapes. :func:`check_state` has passed the snapshot; in a pipeline stage, the model has the weights of its blocks."""
    names = ModelTensors(model, optimizer)
    with snapshot.comparing():
        _check_tensors(snapshot, names, own_buffers(snapshot, model), dict(model.named_buffers()))
        _check_groups(snapshot, names)
        _check_optimizer(snapshot, names, optimizer)


def _check_tensors(
    snapshot: Snapshot, names: ModelTensors, own: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """What is missing is found where it is read."""
    here = {name: names.place(tensor)[0] for name, tensor in names.tensors.items()}
    for stored, there in snapshot.manifest.tensors.items():
        kind, _, name = stored.partition("/")
        if stored in own:
            known: TensorMetadata | None = Range.of(stored, own[stored]).whole
        elif "@" in kind and (kind != snapshot.own_buffers or name in buffers):
            continue  # another rank's, or cut into other parts
        else:
            known = here.get(names.aliases.get(name, name))
        if known is None and (names.in_stages or name.rpartition(".")[2] == EXTRA):
            continue  # a snapshot has the tensors of the whole model, and a stage those of its blocks
        if known is None:
            raise Wrong(f"{kind} has {shown(name)}: {OTHER_MODEL}")
        # A run may resume in another precision: loading converts floating point numbers.
        floats = there.torch_dtype.is_floating_point and known.torch_dtype.is_floating_point
        alike = floats or there.dtype == known.dtype or kind.startswith("optimizer.")
        if there.size != known.size or not alike:
            raise Wrong(f"{kind}[{shown(name)}] is {there}, and must be {known}: {OTHER_MODEL}")


# ------------------------------------------------------------------------------------ the optimizer


def _check_groups(snapshot: Snapshot, names: ModelTensors) -> None:
    here, there = names.groups(), snapshot.replicated["groups"]
    if len(here) != len(there):
        raise Wrong(f"optimizer has {len(there)} parameter groups, and there are {len(here)} here")
    if names.in_stages or snapshot.manifest.layout.pipeline_stages > 1:  # groups have those of one stage
        return
    for at, (own, theirs) in enumerate(zip(here, there)):
        for name in {*own} ^ {*theirs}:
            where = "there and not here" if name in theirs else "here and not there"
            raise Wrong(f"optimizer.param_groups[{at}]: parameter {shown(name)} is {where}")


def optimizer_values(snapshot: Snapshot, wanted: Iterable[str], copy: str = "") -> dict[str, Any]:
    """The plain values that an optimizer keeps of these parameters, by name, and those of none; ``copy``: whose, if ranks had
    weights of their own, as of :attr:`.ModelTensors.copy`. Raises Wrong if no rank has values of a parameter."""
    missing, manifest = set(wanted), snapshot.manifest
    found: dict[str, Any] = {"state": {}}
    candidates = [int(copy[1:] or 0)]
    if snapshot.has_own and not manifest.layout.apart:
        # This rank's file is small, and has been read.
        candidates.insert(0, snapshot.number_of(current().replica))
    # Then the ranks with elements of a parameter, and at last all.
    for name in missing:
        candidates += [rank for *_, rank in manifest.by_tensor.get(f"weights{copy}/{name}", ())]
    for rank in dict.fromkeys([*candidates, *range(manifest.ranks)]):
        if not missing and "more" in found:
            break
        values = validated(_OfRank, snapshot.state(rank_file(rank)), rank_file(rank)).optimizer
        if values is None:
            continue
        found = {"others": values.others, "more": values.more, **found}
        found["state"].update({name: values.state[name] for name in missing & values.state.keys()})
        missing -= values.state.keys()
    for name in list(missing):  # shards have no state of a parameter without elements
        whole = manifest.tensors.get(f"weights/{name}")
        if whole is not None and not whole.numel:
            found["state"][name] = {}
            missing.discard(name)
    if missing:
        raise Wrong(f"it has no optimizer state of {shown(min(missing))}: {OTHER_MODEL}")
    return found


def _check_optimizer(snapshot: Snapshot, names: ModelTensors, optimizer: torch.optim.Optimizer) -> None:
    parts = names.parts
    values = optimizer_values(snapshot, {part.name for part in parts})
    if names.is_split:
        check_split(values)
    elif snapshot.replicated["groups"] != names.groups():
        # LBFGS keeps vectors of all parameters, one behind the other, with the first.
        for name, entries in values["state"].items():
            for key, value in entries.items():
                if not is_single(value):
                    raise Wrong(
                        f"optimizer.state[{shown(name)}].{key} is {described(value)}, which may be in the order of the parameters, "
                        "and this order is another one here"
                    )
    for part, expected in zip(parts, state_after_a_step(optimizer)):
        kept, place = values["state"][part.name], f"optimizer.state[{shown(part.name)}]"
        for key, value in expected.items() if kept else ():
            if key not in kept:
                raise Wrong(f"{place} has no {key}, which this optimizer with its options needs")
            if not isinstance(value, Tensor):
                continue
            entry = snapshot.manifest.tensors.get(f"optimizer.{key}/{part.name}", kept[key])
            if isinstance(entry, TensorMetadata):
                fits = value.dim() > 0 or not entry.size
                fits &= entry.torch_dtype.is_complex == value.is_complex()
            elif isinstance(entry, Tensor):
                fits = entry.shape == value.shape and entry.is_complex() == value.is_complex()
            else:  # a count of steps may be a number
                fits = value.dim() == 0 and is_number(entry)
            if not fits:
                said = entry if isinstance(entry, TensorMetadata) else described(entry)
                raise Wrong(f"{place}.{key} is {said}, and must be {described(value)}")
