"""The state in a snapshot besides weights: its schema, and its comparison with the model and optimizer that resume from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from hvd_ckpt.distributed.replicas import ReplicasState
from hvd_ckpt.parallel.local_sgd.state import AveragesState
from hvd_ckpt.parallel.pipeline.pipeline import Pipeline
from hvd_ckpt.reduction.state import GradientsState, ReducerState, parts_of
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.snapshots.content import ShardState, named_tensors
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.resume import (
    OptimizerShard,
    check_averages,
    check_optimizer,
    check_sharding,
    check_split,
    check_tensors,
)
from hvd_ckpt.snapshots.schema import ShardMetadata
from hvd_ckpt.snapshots.slices import cuts_of
from hvd_ckpt.snapshots.tensors import check_tensor, map_tensors
from hvd_ckpt.utils.schema import Wrong, first_error, shown
from hvd_ckpt.utils.states import NUMBER, Count, OptimizerState, Positive, SplitState, State


class Average(State):
    """The state of averaged weights."""

    n_averaged: Count
    averages: dict[str, Tensor] | None


class Scaler(State):
    """The state of a gradient scaler."""

    scale: Annotated[float, Field(gt=0), NUMBER]
    growth_factor: Annotated[float, Field(gt=1), NUMBER]
    backoff_factor: Annotated[float, Field(gt=0, le=1), NUMBER]
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)]
    growth_tracker: Annotated[int, Field(ge=0, lt=2**31, alias="_growth_tracker")]


class _Pieces(State):
    weights: list[tuple[str, Count, Count]]
    optimizer: list[tuple[str, Count, Count]]


class Local(State):
    """State that a rank of local SGD has of its own between averages; rank 0's weights and optimizer state are the snapshot's.

    With ``pieces`` both are shards, 1-D, which it has by name, first and last + 1 element; those of rank 0's group are the
    snapshot's own.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    groups: list[list[str]] = Field(default_factory=list)
    pieces: _Pieces | None
    scaler: Scaler | None
    averages: AveragesState

    @model_validator(mode="after")
    def _has_state_of_its_pieces(self) -> Local:
        if self.optimizer is not None:
            schema = OptimizerState if self.pieces is None else OptimizerShard
            schema.check(self.optimizer, "optimizer")
        return self


class ReplicatedState(State):
    """State that is the same on every rank; ``optimizer`` and the averages of ``ema`` are None where they are in shards.

    ``kinds``: the names of the classes of optimizer and scheduler; ``groups``: the names of the parameters in each group.
    ``mid_period``: the ranks of local SGD have weights of their own.
    """

    kinds: dict[str, str | None] = Field(default_factory=dict)
    groups: list[list[str]] = Field(default_factory=list)
    optimizer: OptimizerState | None
    ema: Average | None
    scaler: Scaler | None
    threads: Positive
    device: str
    replicas: ReplicasState | None
    extra: dict[str, Any] = Field(default_factory=dict)  # rank 0's
    mid_period: bool


class PerRankState(State):
    """State of one rank; a reducer of sharded gradients validates its ``reduction`` itself."""

    random: dict[str, Any]
    reduction: dict[str, Any]
    buffers: dict[str, Tensor]
    extra: dict[str, Any] = Field(default_factory=dict)  # of modules, from get_extra_state()
    local: Local | None


class LoopState(ReplicatedState):
    """State of a loop of one's own that is the same on every rank."""

    scheduler: dict[str, Any] | None
    loader: dict[str, Any] | None
    loop: dict[str, Any]


class LoopRankState(PerRankState):
    """State of a loop of one's own of each rank; ``loader`` is None if that is the same on every rank."""

    loader: dict[str, Any] | None


R = TypeVar("R", bound=ReplicatedState)


def check_state(snapshot: Snapshot, replicated: type[R], per_rank: type[PerRankState]) -> R:
    """The replicated state. Raises Wrong unless it and the per-rank state have these schemas; names the first wrong entry."""
    in_shards = snapshot.sharding is not None
    with _schema("replicated"):
        checked = replicated.model_validate(snapshot.replicated)
    whole = {"optimizer": checked.optimizer} | (
        {} if checked.ema is None else {"ema.averages": checked.ema.averages}
    )
    for name, value in whole.items():
        if (value is None) != in_shards:
            raise Wrong(
                f"replicated.{name} must be there where the optimizer's state is not sharded, and only there"
            )
    for state in snapshot.per_stage:
        with _schema("per_rank"):
            of_rank = per_rank.model_validate(state)
        gradients, learned = parts_of(of_rank.reduction)
        with _schema("per_rank.reduction"):
            GradientsState.model_validate(gradients)
            if learned and (snapshot.sharding is None or snapshot.sharding.stage < 2):
                ReducerState.model_validate(learned)
    return checked


@contextmanager
def _schema(place: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise Wrong(f"{place}: {first_error(error)}") from None


def check_content(
    replicated: Mapping[str, Any], per_rank: Mapping[str, Any], shard: ShardState | None
) -> None:
    """Raises Wrong unless the optimizer's state that is to be saved is one that :func:`check_state` and the loading accept.

    The arguments are those of :meth:`hvd_ckpt.snapshots.writer.SnapshotWriter.begin`.
    """

    def as_in_a_file(state: Any) -> Any:
        def kept(tensor: Tensor, place: str) -> Tensor:
            check_tensor(tensor, place)
            return tensor

        return map_tensors(state, "optimizer", kept)

    local = per_rank["local"]
    with _schema("optimizer"):
        if shard is not None:
            check_split(as_in_a_file(shard.state), shard.shards.optimizer)
        if replicated["optimizer"] is not None:
            OptimizerState.model_validate(as_in_a_file(replicated["optimizer"]))
        if local is not None and local["optimizer"] is not None:
            own = as_in_a_file(local["optimizer"])
            if local["pieces"] is None:
                OptimizerState.model_validate(own)
            else:
                check_split(own, ShardMetadata.of(local["pieces"]["optimizer"]))


def kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of an optimizer, as it was before it was distributed."""
    kind: type = getattr(optimizer, "wrapped_class", type(optimizer))
    return kind


def check_kinds(snapshot: Snapshot, here: Mapping[str, str | None]) -> None:
    """Raises Wrong where optimizer or scheduler are of another class than those of the snapshot."""
    for what, there in snapshot.replicated.get("kinds", {}).items():
        own = here.get(what)
        if own is not None and there is not None and own != there:
            raise Wrong(f"its {what} is {shown(there)}, and the {what} here is {shown(own)}")


def check_fits(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    specs: Mapping[str, TensorSpec],
) -> None:
    """Raises Wrong unless weights, buffers and optimizer state are of this model and optimizer, by names and shapes.

    Args:
        snapshot: that :func:`check_state` has passed.
        model: the model that will have these weights; in a pipeline stage, those of its blocks.
        optimizer: optimizer of the model, distributed or not.
        specs: specs of the optimizer's parameters, by name.
    """
    stage = getattr(optimizer, "shard_stage", 0)
    # Extra state of modules is not among the weights, unless it is a tensor.
    whole = {} if stage == 3 else model.state_dict()
    known = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
    known = known or named_tensors(model)
    buffers = dict(model.named_buffers())
    pipeline = isinstance(model, Pipeline)

    def of_model(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A snapshot has the tensors of the whole model, and a stage those of its blocks.
        return {name: tensor for name, tensor in given.items() if name in expected or not pipeline}

    check_tensors(of_model(snapshot.weight_specs, known), known, "weights", True)
    ema = snapshot.replicated["ema"]
    if snapshot.sharding is not None:
        check_sharding(snapshot.sharding, specs, cuts_of(model))
    else:
        if pipeline or stage > 0:
            with _schema("optimizer"):
                SplitState.model_validate(snapshot.replicated["optimizer"])
        if not pipeline:
            check_optimizer(snapshot.replicated["optimizer"], optimizer, sharded=stage > 0)
        if ema is not None and not pipeline:
            check_averages(ema["averages"], "ema.averages", model)
    replicas = snapshot.replicated["replicas"] or {"buffers": {}}
    for of_replica in replicas["buffers"].values():
        check_tensors(of_model(of_replica, buffers), buffers, "replicas.buffers", False)
    for state in snapshot.per_stage:
        check_tensors(of_model(state["buffers"], buffers), buffers, "buffers", False)
        local = state["local"]
        if local is not None and local["optimizer"] is not None and local["pieces"] is None:
            check_tensors(local["weights"], dict(model.named_parameters()), "local.weights", True)
            check_optimizer(local["optimizer"], optimizer)
