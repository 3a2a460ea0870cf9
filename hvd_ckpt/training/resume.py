"""Resuming a run: validation of a snapshot against the run, loading of its state, and the snapshots of a later step.

Where the state itself is validated and resharded: :mod:`hvd_ckpt.snapshots.resume`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import horovod.torch as hvd
import torch
from pydantic import AfterValidator, AllowInfNan, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvd_ckpt.json_file import Wrong, shown
from hvd_ckpt.precision import GradScaler
from hvd_ckpt.schema import Strict, first_error
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.sharding.state import load_parts
from hvd_ckpt.snapshots.folder import Warn, list_snapshots, remove_all, step_of
from hvd_ckpt.snapshots.random_state import set_random_state
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.resume import (
    OptimizerState,
    check_averages,
    check_optimizer,
    check_sharding,
    check_tensors,
    ranges_of,
    read_shards,
)
from hvd_ckpt.snapshots.schema import DAMAGED, MAX_RANKS
from hvd_ckpt.snapshots.shards import RunShards
from hvd_ckpt.training.collective import ResumePoint, errors_everywhere
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.report import Report

__all__ = [
    "Progress",
    "average_state",
    "average_weights",
    "check_fits",
    "check_resumed",
    "check_state",
    "later_snapshots",
    "load_average",
    "load_optimizer",
    "load_rank_state",
    "load_state",
    "plan_text",
    "read_snapshot",
    "remove_abandoned",
]

FIXED = ("seed", "optimizer", "batch_norm")  # settings without which the state has no meaning
PLANNED = ("budget", "plan", "batch", "accumulate", "precision", "batch_norm", "model_options")

Count = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has characters that are not Unicode") from None
    return text


# ------------------------------------------------------------------------------------ the state of a run


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
    best: float | None = None
    waited: Count = 0
    pending_evaluation: bool = False


class _Average(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    n_averaged: Count
    averages: dict[str, Tensor] | None


class _Scaler(Strict):
    scale: Annotated[float, Field(gt=0)]
    growth_factor: Annotated[float, Field(gt=1)]
    backoff_factor: Annotated[float, Field(gt=0, le=1)]
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)]
    growth_tracker: Annotated[int, Field(ge=0, lt=2**31, alias="_growth_tracker")]


class _Reduction(Strict):
    """The state of a reducer of whole gradients; empty where it has none."""

    version: Count
    order: list[str]
    sparse: dict[str, Count]
    densified: dict[str, Count]
    bucket_cap_bytes: Annotated[float, Field(gt=0)]
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


class _Replicated(Strict):
    """State that is the same on every rank; ``optimizer`` and the averages of ``ema`` are None where they are sharded."""

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


class _PerRank(Strict):
    """State of one rank; a reducer of sharded gradients validates its ``reduction`` itself."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    random: dict[str, Any]
    reduction: dict[str, Any]
    buffers: dict[str, Tensor]
    logged: tuple[Annotated[float, AllowInfNan()], Annotated[float, Field(ge=0)]]


def check_state(resumed: Snapshot) -> None:
    """Raises ConfigError unless the snapshot holds what a run writes, by keys, types and ranges; names the first that is wrong."""
    stage = 0 if resumed.sharding is None else resumed.sharding.stage
    with _naming(resumed, DAMAGED):
        with _schema("replicated"):
            replicated = _Replicated.model_validate(resumed.replicated)
        if (replicated.optimizer is None) != (stage > 0):
            raise Wrong(
                "replicated.optimizer must be there where the optimizer's state is not sharded, and only there"
            )
        if replicated.ema is not None and (replicated.ema.averages is None) != (stage > 0):
            raise Wrong(
                "replicated.ema.averages must be there where the optimizer's state is not sharded, and only there"
            )
        _check_config(replicated.config)
        if resumed.per_rank is not None:
            with _schema("per_rank"):
                per_rank = _PerRank.model_validate(resumed.per_rank)
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
        if resumed.per_rank is not None:
            check_tensors(resumed.per_rank["buffers"], dict(model.named_buffers()), "buffers", False)


def check_resumed(config: Config, samples: int, resumed: Snapshot) -> None:
    """Raises ConfigError if the run cannot resume from the snapshot.

    Args:
        samples: that there are to train on.
    """
    then = resumed.replicated["config"]
    for name in FIXED:
        if then[name] != getattr(config, name):
            raise ConfigError(
                f"{name} {getattr(config, name)}: the run that is to resume has {then[name]}, and its state needs it"
            )
    if resumed.replicated["samples"] != samples:
        raise ConfigError(
            f"resume: the run had {resumed.replicated['samples']} samples to train on and there are {samples} now: give the same "
            "data, sequence_length and validation_split"
        )


def plan_text(config: Config, resumed: Snapshot | None) -> str | None:
    """The plan of the snapshot, if nothing has changed that it was made for."""
    if resumed is None:
        return None
    then, text = resumed.replicated["config"], resumed.replicated["plan"]
    same = all(then[name] == getattr(config, name) for name in PLANNED)
    return text if same else None


# ------------------------------------------------------------------------------------ loading


def read_snapshot(
    point: ResumePoint,
    config: Config,
    samples: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Snapshot | None:
    """Reads and validates the snapshot to resume from, and loads its weights; None for the beginning.

    Args:
        samples: that there are to train on.
        optimizer: of the model, not yet distributed.

    Raises:
        ConfigError, SnapshotError: the snapshot cannot be used, or is of another run.
    """
    snapshot = point.read()
    if snapshot is not None:
        check_state(snapshot)
        check_resumed(config, samples, snapshot)
        check_fits(snapshot, model, optimizer)
        try:
            model.load_state_dict(snapshot.weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"resume {config.resume}: the snapshot is of another model: {reason}") from None
    return snapshot


def load_state(
    snapshot: Snapshot,
    kept: dict[str, dict[str, Any]],
    model: nn.Module,
    optimizer: Any,
    shards: RunShards,
    average: AveragedWeights | None,
    scaler: GradScaler | None,
    report: Report,
) -> None:
    """Loads everything but the weights. Collective.

    Args:
        kept: the state that the optimizer keeps of each shard, from before it was distributed.
        optimizer: the ``DistributedOptimizer``.
        report: continues the open entry of its log.
    """
    parts = None
    with errors_everywhere("hvd_ckpt.train.parts"):
        if snapshot.sharding is not None:
            parts = read_shards(snapshot, ranges_of(optimizer, model), kept, len(optimizer.param_groups))
    load_optimizer(snapshot, parts, optimizer)
    shards.broadcast_weights(optimizer)
    if average is not None:
        load_average(average, snapshot.replicated, parts)
    with errors_everywhere("hvd_ckpt.train.resume"):
        load_rank_state(snapshot, model, optimizer, scaler, report)


def load_optimizer(resumed: Snapshot, parts: Sequence[Mapping[str, Any]] | None, optimizer: Any) -> None:
    """Loads the optimizer's state; the options of its groups stay as they are. Collective.

    Args:
        parts: what :func:`~hvd_ckpt.snapshots.resume.read_shards` returned, if the state was sharded.
        optimizer: a ``DistributedOptimizer``.
    """
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    if parts is None:
        optimizer.load_state_dict(resumed.replicated["optimizer"])
    else:
        load_parts(optimizer, parts)
    for group, kept in zip(optimizer.param_groups, options):
        group.update(kept)


def load_rank_state(
    resumed: Snapshot, model: nn.Module, optimizer: Any, scaler: GradScaler | None, report: Report
) -> None:
    """Loads the scaler's and the per-rank state; the latter only where as many ranks wrote it as there are.

    Args:
        optimizer: a ``DistributedOptimizer``, with its state.
        report: continues the open entry of its log.

    Raises:
        ValueError: the state does not belong to this run.
    """
    replicated, per_rank = resumed.replicated, resumed.per_rank
    if scaler is not None and replicated["scaler"] is not None:
        scaler.load_state_dict(replicated["scaler"])
    if resumed.ranks != hvd.size() or per_rank is None:
        return  # each rank draws new random states, and learns anew when gradients are final
    if hvd.rank() == 0 and replicated["threads"] != torch.get_num_threads():
        warnings.warn(
            f"The run had {replicated['threads']} CPU threads a rank, and has {torch.get_num_threads()} now: the bits of its "
            f"results may change; give OMP_NUM_THREADS={replicated['threads']} for the same.",
            stacklevel=2,
        )
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in per_rank["buffers"].items():
            buffers[name].copy_(value)
    if getattr(optimizer, "shard_stage", 0) == (0 if resumed.sharding is None else resumed.sharding.stage):
        optimizer.load_reduction_state_dict(per_rank["reduction"])
    report.go_on(per_rank["logged"])
    set_random_state(per_rank["random"])


# ------------------------------------------------------------------------------------ averaged weights


def average_weights(optimizer: Any, decay: float | None) -> AveragedWeights | None:
    """The exponential moving average of a run's weights, if it has one.

    Args:
        optimizer: a ``DistributedOptimizer`` with the weights that the run begins with.
        decay: of the average; None for a run without one.
    """
    if decay is None:
        return None
    return AveragedWeights(optimizer, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def average_state(
    average: AveragedWeights | None, sharded: bool
) -> tuple[dict[str, Any] | None, dict[int, Tensor] | None]:
    """The average as replicated state, by parameter where nothing is sharded, and as this rank's shard, by its number."""
    if average is None:
        return None, None
    state = average.state_dict()
    names = [name for name, _, _ in state["pieces"]]
    whole = None if sharded else {names[number]: one for number, one in state["averages"].items()}
    return {"n_averaged": state["n_averaged"], "averages": whole}, state["averages"] if sharded else None


def load_average(
    average: AveragedWeights, replicated: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None
) -> None:
    """Loads the average of a snapshot; without one it begins anew, with the next update. Collective.

    Args:
        replicated: state of the snapshot.
        parts: what :func:`~hvd_ckpt.snapshots.resume.read_shards` returned, if the state was sharded.
    """
    state = replicated["ema"]
    if state is None:
        return
    if parts is None:
        whole = state["averages"]
        pieces = [(name, 0, one.numel()) for name, one in whole.items()]
        parts = [{"pieces": pieces, "averages": dict(enumerate(whole.values()))}]
    average.load_state_dict([{**part, "n_averaged": state["n_averaged"]} for part in parts])


# ------------------------------------------------------------------------------------ snapshots of later steps


def later_snapshots(folder: Path, step: int) -> list[Path]:
    """Snapshots in a folder of later steps than this."""
    return [path for path in list_snapshots(folder) if step_of(path) > step]


def remove_abandoned(abandoned: list[Path], written: Path, warn: Warn | None = None) -> None:
    """Removes later snapshots than the one a run has resumed from, now that it has written one of its own.

    Whenever the process is killed, there is a snapshot to resume from, and the newest is the old course's last or the new one,
    never one between: the new one is in place first; then the others lose their names, the oldest first; only then are their
    files removed, which may take long.

    Args:
        abandoned: the snapshots; empty when this returns.
        written: the new one, which may have the place of one of them.
        warn: takes warnings of what cannot be removed; by default they are Python's.
    """
    remove_all(sorted((path for path in abandoned if path != written), key=step_of), warn)
    abandoned.clear()
