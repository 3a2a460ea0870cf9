"""Per-rank state of local SGD in a snapshot: weights and state that differ between ranks between averages.

The weights and optimizer state of the snapshot are those of rank 0 or its group. Any number of ranks can load these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvd_ckpt.distributed.precision import GradScaler
from hvd_ckpt.parallel.local_sgd.optimizer import STATE, LocalOptimizer
from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.snapshots.content import RunShards, of_wrapped
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.order import parameter_names
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.snapshots.resume import check_shard
from hvd_ckpt.snapshots.schema import DAMAGED, ShardMetadata
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.schema import Wrong


def local_state(
    optimizer: Any, model: nn.Module, scaler: GradScaler | None, shards: RunShards
) -> dict[str, Any] | None:
    """The state of this rank between averages, or None if all ranks step together."""
    if not isinstance(optimizer, LocalOptimizer):
        return None
    state = optimizer.state_dict()
    averages, kept = state[STATE], of_wrapped(state)
    weights = _weights_by_name(optimizer) if optimizer.shard_stage else dict(model.named_parameters())
    written = shards.is_first if shards.sharded else hvd.rank() == 0  # elsewhere in the snapshot
    return {
        "weights": {} if written else weights,
        "optimizer": None if written else kept,
        "groups": parameter_names(optimizer),
        "pieces": _pieces_of(optimizer),
        "scaler": None if scaler is None else scaler.state_dict(),
        "averages": averages,
    }


def _weights_by_name(optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: values for name, _, _, values in optimizer.weight_pieces()}


def whole_state(optimizer: Any) -> dict[str, Any]:
    """The state of the wrapped optimizer, which any number of ranks can load; the same on every rank, or rank 0's is."""
    state: dict[str, Any] = optimizer.state_dict()
    state.pop(STATE, None)
    return state


def load_local(
    snapshot: Snapshot, model: nn.Module, optimizer: Any, expected: Mapping[str, Mapping[str, Any]]
) -> tuple[Snapshot, dict[str, Any] | None]:
    """Loads this rank's own weights, if the period continues, and returns the snapshot with its optimizer state and loss scale.

    Collective. Otherwise a new period begins with what rank 0 had, and outer momentum begins at zero.

    Args:
        expected: see :func:`hvd_ckpt.snapshots.resume.read_shards`.

    Returns:
        The snapshot, and the state of the averages; None if a new period begins.

    Raises:
        SnapshotError: it lies within a period, and the optimizer is not one of the same period and ranks; or it is damaged. On
            every rank.
    """
    shared = snapshot.replicated
    own = snapshot.per_rank["local"] if snapshot.per_rank and snapshot.ranks == hvd.size() else None
    fault = None
    with errors_on_all("Snapshots: period"):
        if not isinstance(optimizer, LocalOptimizer):
            fault = "the optimizer is not one of LocalSGD"
        elif own is None:
            fault = f"there are {hvd.size()} ranks, and it has the weights of {snapshot.ranks}"
        elif own["pieces"] != _pieces_of(optimizer):
            fault = "its ranks have other shards of the weights"
        else:
            assert optimizer.averaging is not None
            try:
                optimizer.averaging.check(own["averages"])
            except ValueError as error:
                fault = str(error)
        # At the end of a period, all ranks have the same weights, so any ranks may begin a new one.
        if fault is not None and shared["mid_period"]:
            raise SnapshotError(
                f"The snapshot of step {snapshot.step} lies within a period of local SGD, where ranks have weights of their own: "
                f"{fault}; give the same ranks and settings, or resume from a period's end (one fragment, no delay)."
            )
        if own is not None and fault is None and own["pieces"] is not None and own["optimizer"] is not None:
            try:
                _check_own(own, optimizer, expected)
            except Wrong as error:
                raise SnapshotError(
                    f"The snapshot of step {snapshot.step} cannot be used: per_rank.local: {error}: {DAMAGED}."
                ) from None
    if not isinstance(optimizer, LocalOptimizer):
        return snapshot, None
    if own is None or fault is not None:
        if hvd.rank() == 0:
            run_warnings.warn("A new period of local SGD begins; outer momentum, if any, is zero.")
        return snapshot, None
    if own["pieces"] is None:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in own["weights"]:
                    weight.copy_(own["weights"][name])
    elif own["optimizer"] is not None:  # on all ranks of a group alike
        sharded: Any = optimizer
        sharded.load_weight_pieces(
            [(*piece[:3], own["weights"][piece[0]]) for piece in sharded.weight_pieces()]
        )
    state = own["optimizer"] or shared["optimizer"]
    scaler = own["scaler"] or shared["scaler"]
    resumed = dataclasses.replace(snapshot, replicated={**shared, "optimizer": state, "scaler": scaler})
    return resumed, own["averages"]


def _pieces_of(optimizer: Any) -> dict[str, list[tuple[str, int, int]]] | None:
    """This rank's shards of weights and optimizer state; None if it has whole ones."""
    if not optimizer.shard_stage:
        return None
    return {
        "weights": [piece[:3] for piece in optimizer.weight_pieces()],
        "optimizer": [(elements.name, elements.start, elements.stop) for elements in optimizer.pieces],
    }


def _check_own(own: Mapping[str, Any], optimizer: Any, expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Wrong unless a rank's own shards are of the sizes that it has."""
    here = _weights_by_name(optimizer)
    for name, values in here.items():
        given = own["weights"].get(name)
        if given is None or (given.shape, given.dtype) != (values.shape, values.dtype):
            raise Wrong(f"weights has no shard of {name} with {values.numel()} elements of {values.dtype}")
    check_shard(
        own["optimizer"], ShardMetadata.of(own["pieces"]["optimizer"]), expected, len(optimizer.param_groups)
    )
