"""What each rank of local SGD has of its own between averages, as per-rank state of a snapshot.

Rank 0's weights and optimizer state are those of the snapshot, which any number of ranks can load.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.local_sgd.optimizer import STATE, LocalOptimizer
from hvd_ckpt.precision import GradScaler
from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import Snapshot


def state_of_rank(optimizer: Any, model: nn.Module, scaler: GradScaler | None) -> dict[str, Any] | None:
    """What this rank has of its own between averages; None where all ranks step together."""
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


def load_rank(snapshot: Snapshot, model: nn.Module, optimizer: Any) -> Snapshot:
    """Loads this rank's own weights, if the period goes on, and returns the snapshot with its optimizer state and loss scale.

    Collective. Otherwise a new period begins with what rank 0 had, and outer momentum begins at zero.

    Raises:
        SnapshotError: the snapshot lies within a period, and the optimizer is not one of the same period and ranks; on every rank.
    """
    shared = snapshot.replicated
    own = snapshot.per_rank["local"] if snapshot.per_rank and snapshot.ranks == hvd.size() else None
    fault = None
    with errors_on_all("hvd_ckpt.snapshots.period"):
        if not isinstance(optimizer, LocalOptimizer):
            fault = "the optimizer is not one of LocalSGD"
        elif own is None:
            fault = f"there are {hvd.size()} ranks, and it has the weights of {snapshot.ranks}"
        else:
            assert optimizer._averaging is not None
            try:
                optimizer._averaging.check(own["averages"])
            except ValueError as error:
                fault = str(error)
        if fault is not None and shared["mid_period"]:
            raise SnapshotError(
                f"The snapshot of step {snapshot.step} lies within a period of local SGD, where ranks have weights of their own: "
                f"{fault}; give the same ranks and settings, or resume from a period's end (one fragment, no delay)."
            )
    if not isinstance(optimizer, LocalOptimizer):
        return snapshot
    if own is None or fault is not None:
        if hvd.rank() == 0:
            warnings.warn("A new period of local SGD begins; outer momentum, if any, is zero.", stacklevel=2)
        return snapshot
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in own["weights"]:
                weight.copy_(own["weights"][name])
    state = {**(own["optimizer"] or shared["optimizer"]), STATE: own["averages"]}
    return dataclasses.replace(
        snapshot, replicated={**shared, "optimizer": state, "scaler": own["scaler"] or shared["scaler"]}
    )
