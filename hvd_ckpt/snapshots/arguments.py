"""Checks of the arguments of ``Snapshots``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvd_ckpt.processes.grid import current
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.averaging import AveragedWeights
from hvd_ckpt.snapshots.tensors import map_tensors
from hvd_ckpt.utils.own_state import extra_states
from hvd_ckpt.utils.schema import Wrong


def check_arguments(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, loader: Any, average: Any, keep: Any
) -> None:
    """Raises TypeError or ValueError for the first argument that is wrong."""
    if not isinstance(optimizer, ReducedOptimizer):
        raise TypeError(
            f"Snapshots: optimizer is a {type(optimizer).__name__}: give hc.DistributedOptimizer(...) of it"
        )
    for name, value, kind, right in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("scaler", scaler, torch.amp.GradScaler, "an hc.GradScaler, or None"),
        ("average", average, AveragedWeights, "hc.AveragedWeights, or None"),
        ("keep", keep, int, "a number of snapshots"),
    ):
        if not isinstance(value, kind) and not (value is None and right.endswith("None")):
            raise TypeError(f"Snapshots: {name} is a {type(value).__name__}: give {right}")
    for name, value in (("scheduler", scheduler), ("loader", loader)):
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(
                f"Snapshots: {name} is a {type(value).__name__}, which has no state_dict() and load_state_dict(): give "
                f"{'an hc.data.DistributedSampler or hc.data.DataLoader' if name == 'loader' else 'one that has'}"
            )
    if keep < 1:
        raise ValueError(f"Snapshots: keep is {keep}: keep 1 snapshot or more")
    _check_extra_states(model)
    if optimizer.is_local:
        _check_local(optimizer, average)


def _check_extra_states(model: nn.Module) -> None:
    """Raises TypeError for a module's extra state that files do not hold, or that is in one of several stages or parts."""
    for name, state in extra_states(model).items():
        in_parts = current().model_parallel_size > 1
        reason = "with pipeline stages or parts, a snapshot holds" if in_parts else ""
        try:
            map_tensors(state, f"the state of module '{name}'", lambda tensor, _: tensor)
        except Wrong as error:
            reason = f"{error}; a snapshot holds plain values, tensors and"
        if reason:
            raise TypeError(
                f"Snapshots: the module '{name}' has a get_extra_state(), which returns a {type(state).__name__}; {reason} "
                "parameters and buffers: keep that state in buffers"
            )


def _check_local(optimizer: Any, average: AveragedWeights | None) -> None:
    """Raises ValueError where what a rank of local SGD has is not a whole model."""
    for wrong, reason in (
        (optimizer.members.process_set_id != 0, "is of a process set: give it all ranks"),
        (average is not None, "has other weights on each rank: leave out average"),
        (current().stages > 1, "has parts of the model: use init(stages=1)"),
    ):
        if wrong:
            raise ValueError(f"Snapshots: optimizer is one of LocalSGD, and {reason}")
