"""Checks of the arguments of ``Snapshots``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.snapshots.tensors import map_tensors, stored
from hvd_ckpt.utils.own_state import extra_states
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.schema import Wrong


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


def check_arguments(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, average: Any, keep: Any
) -> None:
    """Raises TypeError or ValueError for the first argument that is wrong."""
    with_state = "which has state_dict() and load_state_dict(), or None"
    for name, value, kind, right in (
        ("optimizer", optimizer, ReducedOptimizer, "hc.DistributedOptimizer(...) of it"),
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("scaler", scaler, torch.amp.GradScaler, "an hc.GradScaler, or None"),
        ("average", average, AveragedWeights, "hc.AveragedWeights, or None"),
        ("keep", keep, int, "a number of snapshots"),
        ("scheduler", scheduler, _HasState, f"a scheduler {with_state}"),
        ("loader", loader, _HasState, f"an hc.data.DistributedSampler or a loader {with_state}"),
    ):
        if not isinstance(value, kind) and not (value is None and right.endswith("or None")):
            raise TypeError(f"Snapshots: {name} is a {type(value).__name__}: give {right}")
    if keep < 1:
        raise ValueError(f"Snapshots: keep is {keep}: keep 1 snapshot or more")
    for name, state in extra_states(model).items():
        reason = (
            "with pipeline stages or parts, a snapshot holds" if current().model_parallel_size > 1 else ""
        )
        try:
            map_tensors(state, f"the state of module '{name}'", stored)
        except Wrong as error:
            reason = f"{error}; a snapshot holds plain values, tensors and"
        if reason:
            raise TypeError(
                f"Snapshots: the module '{name}' has a get_extra_state(), which returns a {type(state).__name__}; {reason} "
                "parameters and buffers: keep that state in buffers"
            )
    members = optimizer.members if optimizer.is_local else optimizer.process_set
    check({"Snapshots": True, "an optimizer of a process set": len(ranks_of(members)) < hvd.size()})
    if optimizer.is_local and average is not None:
        raise ValueError(
            "Snapshots: optimizer is one of LocalSGD, and has other weights on each rank: leave out average"
        )
