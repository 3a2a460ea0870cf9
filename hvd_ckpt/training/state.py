"""The state of a run in a snapshot: its schema, and whether it fits the model and optimizer that resume from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn

from hvd_ckpt.schema import Strict, Wrong, first_error, shown
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.resume import (
    OptimizerState,
    check_averages,
    check_optimizer,
    check_sharding,
    check_tensors,
)
from hvd_ckpt.snapshots.schema import DAMAGED, MAX_RANKS
from hvd_ckpt.training.config import Config, ConfigError

FIXED = ("seed", "optimizer", "batch_norm", "replicas")  # settings without which the state has no meaning
PLANNED = (
    "budget", "plan", "batch", "accumulate", "precision", "batch_norm", "model_options",
    "stages", "pipeline_schedule", "virtual_stages",
)  # fmt: skip

Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has characters that are not Unicode") from None
    return text


def _no_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):  # pydantic takes one of a single element for a number
        raise ValueError("must be a number, not a tensor")
    return value


NUMBER = BeforeValidator(_no_tensor)
Logged = tuple[Annotated[float, AllowInfNan(), NUMBER], Annotated[float, Field(ge=0), NUMBER]]


class Progress(Strict):
    """Progress of a run.

    Attributes:
        step: optimizer steps taken.
        position: samples of the stream that are used up.
        best: the lowest loss of an evaluation that was due.
        waited: evaluations since then.
        pending_evaluation: whether the run was stopped where an evaluation is due, which comes first when it resumes.
    """

    model_config = ConfigDict(frozen=False)

    step: Count = 0
    position: Count = 0
    best: Annotated[float, NUMBER] | None = None
    waited: Count = 0
    pending_evaluation: bool = False


class _Average(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    n_averaged: Count
    averages: dict[str, Tensor] | None


class _Scaler(Strict):
    scale: Annotated[float, Field(gt=0), NUMBER]
    growth_factor: Annotated[float, Field(gt=1), NUMBER]
    backoff_factor: Annotated[float, Field(gt=0, le=1), NUMBER]
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)]
    growth_tracker: Annotated[int, Field(ge=0, lt=2**31, alias="_growth_tracker")]


class _Reduction(Strict):
    """The state of a reducer of whole gradients; empty where it has none."""

    version: Count
    order: list[str]
    sparse: dict[str, Count]
    densified: dict[str, Count]
    bucket_cap_bytes: Annotated[float, Field(gt=0), NUMBER]
    counts: dict[str, Count] | None
    lower_counts: dict[str, Count]

    @model_validator(mode="after")
    def _has_each_once(self) -> _Reduction:
        if len(set(self.order)) < len(self.order):
            raise ValueError("order has a name twice")
        twice = sorted(set(self.order) & set(self.sparse))
        if twice:
            raise ValueError(f"{shown(twice[0])} is both in a bucket and unbucketed")
        return self


class _Replicas(Strict):
    """State of logical replicas: for each its buffers, and the loss and terms that the next entry of the log counts so far."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    number: Positive
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    step: Count
    buffers: dict[int, dict[str, Tensor]]
    logged: list[Logged]

    @model_validator(mode="after")
    def _has_all(self) -> _Replicas:
        if set(self.buffers) != set(range(self.number)) or len(self.logged) != self.number:
            raise ValueError(f"buffers and logged must be those of {self.number} replicas")
        return self


class _Replicated(Strict):
    """State that is the same on every rank; ``optimizer`` and the averages of ``ema`` are None where they are in shards."""

    config: dict[str, Any]
    steps: Count
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    progress: Progress
    optimizer: OptimizerState | None
    ema: _Average | None
    scaler: _Scaler | None
    plan: Annotated[str, AfterValidator(_unicode)] | None
    samples: Positive
    threads: Positive
    device: str
    replicas: _Replicas | None


class _PerRank(Strict):
    """State of one rank; a reducer of sharded gradients validates its ``reduction`` itself."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    random: dict[str, Any]
    reduction: dict[str, Any]
    buffers: dict[str, Tensor]
    logged: list[Logged]


def check_state(resumed: Snapshot) -> None:
    """Raises ConfigError unless the snapshot holds what a run writes, by keys, types and ranges; names the first that is wrong."""
    stage = 0 if resumed.sharding is None else resumed.sharding.stage
    in_shards = resumed.sharding is not None
    with _naming(resumed, DAMAGED):
        with _schema("replicated"):
            replicated = _Replicated.model_validate(resumed.replicated)
        if (replicated.optimizer is None) != in_shards:
            raise Wrong(
                "replicated.optimizer must be there where the optimizer's state is not sharded, and only there"
            )
        if replicated.ema is not None and (replicated.ema.averages is None) != in_shards:
            raise Wrong(
                "replicated.ema.averages must be there where the optimizer's state is not sharded, and only there"
            )
        _check_config(replicated.config)
        if replicated.config["replicas"] != (replicated.replicas and replicated.replicas.number):
            raise Wrong("replicated.replicas must be the state of as many replicas as replicated.config says")
        for state in resumed.per_stage:
            with _schema("per_rank"):
                per_rank = _PerRank.model_validate(state)
            if per_rank.reduction and stage < 2:
                with _schema("per_rank.reduction"):
                    _Reduction.model_validate(per_rank.reduction)


def _check_config(value: dict[str, Any]) -> None:
    for name in (*FIXED, *PLANNED):
        if name not in value:
            raise Wrong(f"replicated.config has no {name}")
    try:
        made = Config.make(value)
    except ConfigError as error:
        raise Wrong(f"replicated.config: {error}") from None
    for name, setting in made.as_dict().items():
        if name in value and (type(value[name]) is not type(setting) or value[name] != setting):
            raise Wrong(f"replicated.config.{name} is not a value that a run writes")


@contextmanager
def _schema(place: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise Wrong(f"{place}: {first_error(error)}") from None


@contextmanager
def _naming(resumed: Snapshot, way_out: str) -> Iterator[None]:
    try:
        yield
    except Wrong as error:
        raise ConfigError(
            f"resume: the snapshot of step {resumed.step} cannot be used: {error}: {way_out}"
        ) from None


def check_fits(resumed: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError unless weights, buffers and optimizer state are of this model and optimizer, by names and shapes.

    Args:
        resumed: that :func:`check_state` has passed.
        model: whose weights they are to be.
        optimizer: as it was made, not yet distributed.
    """
    with _naming(resumed, "give the settings that the run had, or another snapshot"):
        check_tensors(resumed.weights, model.state_dict(), "weights", True)
        if resumed.sharding is None:
            check_optimizer(resumed.replicated["optimizer"], optimizer)
            if resumed.replicated["ema"] is not None:
                check_averages(resumed.replicated["ema"]["averages"], "ema.averages", model)
        else:
            check_sharding(resumed.sharding, model, optimizer)
        replicas = resumed.replicated["replicas"] or {"buffers": {}}
        for buffers in replicas["buffers"].values():
            check_tensors(buffers, dict(model.named_buffers()), "replicas.buffers", False)
        for state in resumed.per_stage:
            check_tensors(state["buffers"], dict(model.named_buffers()), "buffers", False)
