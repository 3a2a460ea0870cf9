"""Local SGD in a run: its optimizer, what a step counts, and the state that each rank has of its own."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from torch import nn

from hvd_ckpt.local_sgd.construction import LocalSGD, Nesterov
from hvd_ckpt.local_sgd.optimizer import STATE, LocalOptimizer
from hvd_ckpt.precision import GradScaler
from hvd_ckpt.reduction.construction import is_elastic
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.snapshots import Snapshots
from hvd_ckpt.training.config import Config, ConfigError
from hvd_ckpt.training.ending import errors_everywhere

# Settings that a period begins and ends with.
OF_A_PERIOD = ("local_steps", "fragments", "delay", "wire", "within")


def make_local(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> LocalOptimizer:
    """The ``LocalSGD`` of a run. Collective.

    Raises:
        ConfigError: the job is elastic, or the ranks do not have such groups; on every rank alike.
    """
    assert config.local_steps is not None
    if is_elastic():
        raise ConfigError(
            f"local_steps {config.local_steps}: ranks of an elastic job come and go, and take weights of their own with them, "
            "leave it out"
        )
    momentum = 0.9 if config.outer_momentum is None else config.outer_momentum
    try:
        return LocalSGD(
            optimizer,
            list(model.named_parameters()),
            every=config.local_steps,
            outer=None if config.outer_lr is None else Nesterov(config.outer_lr, momentum),
            fragments=config.fragments,
            delay=config.delay,
            wire=config.wire,
            within=config.within,
            model=model,
        )
    except ValueError as error:
        raise ConfigError(f"local_steps {config.local_steps}: {error}") from None


def begin_mean_terms(optimizer: LocalOptimizer, own: float) -> Callable[[], float]:
    """Begins the mean of the terms that the ranks of this rank's group have in a step, and returns a function that waits for it."""
    members = optimizer._process_set
    if members.size() == 1:
        return lambda: own
    terms = torch.tensor([own], dtype=torch.float64)
    handle = mpi_ops.allreduce_async_(terms, name="hvd_ckpt.train.terms", op=mpi_ops.Sum, process_set=members)
    return functools.cache(lambda: float(mpi_ops.synchronize(handle).item()) / members.size())


# ------------------------------------------------------------------------------------ state


def state_of_rank(optimizer: Any, model: nn.Module, scaler: GradScaler | None) -> dict[str, Any] | None:
    """What this rank has of its own between averages; None where all ranks step together.

    Rank 0's weights and optimizer state are those of the snapshot.
    """
    if not isinstance(optimizer, LocalOptimizer):
        return None
    state = optimizer.state_dict()
    averages = state.pop(STATE)
    first = hvd.rank() == 0
    return {
        "weights": {} if first else dict(model.named_parameters()),
        "optimizer": None if first else state,
        "scaler": None if scaler is None else scaler.state_dict(),
        "averages": averages,
    }


def whole_state(optimizer: Any) -> dict[str, Any]:
    """The state of the wrapped optimizer, which any number of ranks can load; the same on every rank, or rank 0's is."""
    state: dict[str, Any] = optimizer.state_dict()
    state.pop(STATE, None)
    return state


def check_period(config: Config, resumed: Snapshot) -> None:
    """Raises ConfigError if ranks have weights of their own in a snapshot, and the run has other ranks or other periods."""
    if not resumed.replicated["mid_period"]:
        return
    then = resumed.replicated["config"]
    within = f"the snapshot of step {resumed.step} lies within a period of local SGD, where ranks have weights of their own"
    way_out = "or resume from a snapshot of a period's end (one fragment, no delay)"
    for name in OF_A_PERIOD:
        if then[name] != getattr(config, name):
            raise ConfigError(f"{name} {getattr(config, name)}: {within}: give {then[name]}, {way_out}")
    if resumed.replicas != hvd.size():
        raise ConfigError(
            f"resume on {hvd.size()} ranks: {within}: start {resumed.replicas} ranks, {way_out}"
        )


class LocalSnapshots(Snapshots):
    """Snapshots of a run of local SGD, with :func:`state_of_rank` as further state."""

    _of_local_sgd = True


def load_rank(snapshot: Snapshot, model: nn.Module, optimizer: Any) -> Snapshot:
    """Loads this rank's own weights, if the period goes on, and returns the snapshot with its optimizer state and loss scale.

    Collective. Otherwise a new period begins with what rank 0 had, and outer momentum begins at zero.

    Raises:
        ConfigError: the snapshot lies within a period of other groups of ranks; on every rank.
    """
    shared = snapshot.replicated
    own = snapshot.per_rank["local"] if snapshot.per_rank and snapshot.ranks == hvd.size() else None
    if not isinstance(optimizer, LocalOptimizer):
        return snapshot
    with errors_everywhere("hvd_ckpt.train.period"):
        fault = _fault(optimizer, own)
        if fault is not None and shared["mid_period"]:
            raise ConfigError(f"resume: {fault}")
    if own is None or fault is not None:
        if hvd.rank() == 0 and shared["config"]["outer_lr"] is not None:
            warnings.warn("A new period of local SGD begins, with an outer momentum of zero.", stacklevel=2)
        return snapshot
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in own["weights"]:
                weight.copy_(own["weights"][name])
    state = {**(own["optimizer"] or shared["optimizer"]), STATE: own["averages"]}
    return dataclasses.replace(
        snapshot, replicated={**shared, "optimizer": state, "scaler": own["scaler"] or shared["scaler"]}
    )


def _fault(optimizer: LocalOptimizer, own: dict[str, Any] | None) -> str | None:
    assert optimizer._averaging is not None
    try:
        if own is not None:
            optimizer._averaging.check(own["averages"])
    except ValueError as error:
        return str(error)
    return None
