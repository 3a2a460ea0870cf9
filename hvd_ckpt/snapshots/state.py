"""The plain values in a snapshot: their schema."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from hvd_ckpt.distributed.replicas import ReplicasState
from hvd_ckpt.reduction.state import GradientsState, ReducerState, parts_of
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import rank_file
from hvd_ckpt.utils.schema import Wrong, first_error
from hvd_ckpt.utils.states import NUMBER, Count, Positive, State


class Average(State):
    """The state of averaged weights; the averages are tensors of the kind ``average``."""

    n_averaged: Count


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
    """What an optimizer keeps besides tensors of a parameter's elements.

    Attributes:
        state: of each parameter, by name; None for an entry that is a tensor of the snapshot.
        others: of no parameter.
        more: further entries of its ``state_dict()``.
    """

    state: dict[str, dict[str, Any]]
    others: dict[Any, Any]
    more: dict[str, Any]


class ReplicatedState(State):
    """Plain values that are the same on every rank.

    ``kinds``: the names of the classes of optimizer and scheduler; ``groups``: the names of the parameters in each group, and
    ``options``: their options. ``mid_period``: the ranks have weights of their own.
    """

    kinds: dict[str, str | None] = Field(default_factory=dict)
    groups: list[list[str]]
    options: list[dict[str, Any]]
    ema: Average | None
    scaler: Scaler | None
    threads: Positive
    device: str
    replicas: ReplicasState | None
    extra: dict[str, Any] = Field(default_factory=dict)  # rank 0's
    mid_period: bool

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


class LoopState(ReplicatedState):
    """State of a loop of one's own that is the same on every rank."""

    scheduler: dict[str, Any] | None
    loader: dict[str, Any] | None
    loop: dict[str, Any]


class LoopRankState(PerRankState):
    """State of a loop of one's own of each rank; ``loader`` is None if that is the same on every rank."""

    loader: dict[str, Any] | None


S = TypeVar("S", bound=State)
R = TypeVar("R", bound=ReplicatedState)


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
    model_config = ConfigDict(extra="ignore")

    optimizer: OptimizerValues | None


def optimizer_of(snapshot: Snapshot, rank: int) -> OptimizerValues | None:
    """The plain values of the optimizer in a rank's file, which may be another rank's. Raises Wrong unless they have the schema."""
    return validated(_OfRank, snapshot.state(rank_file(rank)), rank_file(rank)).optimizer


def validated(schema: type[S], value: Any, place: str) -> S:
    """The value. Raises Wrong unless it has the schema."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise Wrong(f"{place}: {first_error(error)}") from None
