"""Taking up what a snapshot or a commit holds: weights, optimizer, scaler, and what is each rank's own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_ckpt.precision import GradScaler
from hvd_ckpt.sharding.state import load_parts
from hvd_ckpt.snapshots.random_state import set_random_state
from hvd_ckpt.snapshots.snapshot import Snapshot
from hvd_ckpt.training.config import ConfigError
from hvd_ckpt.training.report import Report

__all__ = ["load_weights", "restore", "restore_optimizer", "with_options"]


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], resume: str | None) -> None:
    """Loads a snapshot's weights.

    Args:
        resume: what the user calls the snapshot.

    Raises:
        ConfigError: they are of another model.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"resume {resume}: the snapshot is of another model: {reason}") from None


def restore_optimizer(resumed: Snapshot, parts: Sequence[Mapping[str, Any]] | None, optimizer: Any) -> None:
    """Takes up the optimizer's state; the options of its groups stay as they are. Collective.

    Args:
        parts: what :func:`~hvd_ckpt.snapshots.resharding.read_parts` gave, if the state was split over the ranks.
        optimizer: a ``DistributedOptimizer``.
    """
    options = [dict(group) for group in optimizer.param_groups]
    if parts is None:
        optimizer.load_state_dict(resumed.common["optimizer"])
    else:
        load_parts(optimizer, parts)
    with_options(optimizer, options)


def restore(
    resumed: Snapshot, model: nn.Module, optimizer: Any, scaler: GradScaler | None, report: Report
) -> None:
    """Takes up all else; what is a rank's own only where as many ranks wrote it as there are.

    Args:
        optimizer: a ``DistributedOptimizer``, with its state.
        report: goes on with the open entry of its log.

    Raises:
        ValueError: the state does not belong to this run.
    """
    common, own = resumed.common, resumed.own
    if scaler is not None and common["scaler"] is not None:
        scaler.load_state_dict(common["scaler"])
    if resumed.ranks != hvd.size() or own is None:
        return  # each rank draws anew, and learns anew when gradients are final
    if hvd.rank() == 0 and common["threads"] != torch.get_num_threads():
        warnings.warn(
            f"The run had {common['threads']} CPU threads a rank, and has {torch.get_num_threads()} now: the bits of its "
            f"results may change; give OMP_NUM_THREADS={common['threads']} for the same.",
            stacklevel=2,
        )
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in own["buffers"].items():
            buffers[name].copy_(value)
    if getattr(optimizer, "shard_stage", 0) == (resumed.shards.stage if resumed.shards is not None else 0):
        optimizer.load_reduction_state_dict(own["reduction"])
    report.go_on(own["logged"])
    set_random_state(own["random"])


def with_options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Gives the parameter groups of an optimizer the options of these; a state that is loaded brings its own."""
    for group, options in zip(optimizer.param_groups, groups):
        group.update({name: value for name, value in options.items() if name != "params"})
