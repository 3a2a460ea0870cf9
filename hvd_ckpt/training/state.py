"""The state of a run in a snapshot: its schema, and whether it fits the model and optimizer that resume from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, AllowInfNan, ConfigDict, Field, model_validator
from torch import nn

from hvd_ckpt.schema import Strict, Wrong
from hvd_ckpt.sharding.layout import TensorSpec
from hvd_ckpt.snapshots import state
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.schema import DAMAGED, MAX_RANKS
from hvd_ckpt.snapshots.state import NUMBER, Count, PerRankState, Positive, Replicas, ReplicatedState, Weight
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.local import OF_A_PERIOD

# Settings without which the state has no meaning.
FIXED = ("seed", "optimizer", "layer_decay", "freeze", "batch_norm", "replicas")
PLANNED = (
    "budget", "plan", "batch", "accumulate", "precision", "batch_norm", "model_options",
    "stages", "pipeline_schedule", "virtual_stages",
)  # fmt: skip


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has characters that are not Unicode") from None
    return text


Logged = tuple[Annotated[float, AllowInfNan(), NUMBER], Weight]


class Progress(Strict):
    """Progress of a run.

    Attributes:
        step: optimizer steps taken.
        position: samples that are used up.
        epoch, epoch_start: of a stream of the user's own, a pass to continue with, and the position at which it begins.
        best: the lowest loss of an evaluation that was due.
        waited: evaluations since then.
        pending_evaluation: whether the run was stopped where an evaluation is due, which comes first when it resumes.
    """

    model_config = ConfigDict(frozen=False)

    step: Count = 0
    position: Count = 0
    epoch: Count = 0
    epoch_start: Count = 0
    best: Annotated[float, NUMBER] | None = None
    waited: Count = 0
    pending_evaluation: bool = False


class _Replicas(Replicas):
    """With the loss and terms of each replica that the next entry of the log counts so far."""

    logged: list[Logged]

    @model_validator(mode="after")
    def _has_entries(self) -> _Replicas:
        if len(self.logged) != self.number:
            raise ValueError(f"logged must be those of {self.number} replicas")
        return self


class _Replicated(ReplicatedState):
    """State that is the same on every rank."""

    config: dict[str, Any]
    steps: Count
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    progress: Progress
    plan: Annotated[str, AfterValidator(_unicode)] | None
    samples: Positive
    replicas: _Replicas | None


class _PerRank(PerRankState):
    """State of one rank."""

    logged: list[Logged]


def check_state(resumed: Snapshot) -> None:
    """Raises ConfigError unless the snapshot holds what a run writes, by keys, types and ranges; names the first that is wrong."""
    with _naming(resumed, DAMAGED):
        replicated = state.check_state(resumed, _Replicated, _PerRank)
        assert isinstance(replicated, _Replicated)
        _check_config(replicated.config)
        if replicated.config["replicas"] != (replicated.replicas and replicated.replicas.number):
            raise Wrong("replicated.replicas must be the state of as many replicas as replicated.config says")


def _check_config(value: dict[str, Any]) -> None:
    for name in (*FIXED, *PLANNED, *OF_A_PERIOD, "outer_lr"):
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
        names = {parameter: name for name, parameter in model.named_parameters()}
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        specs = {names[one]: TensorSpec.of(one) for one in parameters}
        state.check_fits(resumed, model, optimizer, specs)
