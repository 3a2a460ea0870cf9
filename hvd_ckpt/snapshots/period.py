"""Weights that ranks have of their own between averages: each rank, or group of ranks, saves a copy of its own.

Any number of ranks can load that of rank 0. A period continues only on the ranks and with the settings that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd

from hvd_ckpt.reduction.agreement import errors_on_all
from hvd_ckpt.reduction.collectives import ranks_of
from hvd_ckpt.sharding.state import ranges_of
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.reader import Snapshot
from hvd_ckpt.utils import run_warnings


def apart_state(optimizer: Any, scaler: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The state of this rank between averages, or None if all ranks step together."""
    if not optimizer.is_local:
        return None
    return {
        "scaler": scaler,
        "elements": _elements_of(optimizer),
        "averages": {} if optimizer.averaging is None else optimizer.averaging.state_dict(),
    }


def own_copy(snapshot: Snapshot, optimizer: Any) -> tuple[str, dict[str, Any] | None]:
    """Whose weights this rank loads, such as ``"@3"``, and its state between averages; ``""`` and None if a new period begins.

    Collective.

    Raises:
        SnapshotError: it lies within a period, and the optimizer is not one of the same period and ranks; or it is damaged. On
            every rank.
    """
    own = snapshot.per_rank["local"] if snapshot.per_rank and snapshot.replicas == hvd.size() else None
    fault = None
    with errors_on_all("Snapshots: period"):
        if not optimizer.is_local:
            fault = "the optimizer is not one of LocalSGD"
        elif own is None:
            fault = f"there are {hvd.size()} ranks, and it has the weights of {snapshot.ranks}"
        elif own["elements"] != _elements_of(optimizer):
            fault = "its ranks have other shards of the weights"
        else:
            try:
                optimizer.averaging.check(own["averages"])
            except ValueError as error:
                fault = str(error)
        # At the end of a period, all ranks have the same weights, so any ranks may begin a new one.
        if fault is not None and snapshot.replicated["mid_period"]:
            raise SnapshotError(
                f"The snapshot of step {snapshot.step} lies within a period of local SGD, where ranks have weights of their own: "
                f"{fault}; give the same ranks and settings, or resume from a period's end (one fragment, no delay)."
            )
    if not optimizer.is_local:
        return "", None
    if fault is not None:
        if hvd.rank() == 0:
            run_warnings.warn("A new period of local SGD begins; outer momentum, if any, is zero.")
        return "", None
    first = ranks_of(optimizer.process_set)[0]
    return f"@{first}" if first else "", own


def _elements_of(optimizer: Any) -> list[tuple[str, int, int]]:
    """This rank's elements of the parameters."""
    return sorted((elements.name, elements.start, elements.stop) for elements in ranges_of(optimizer))
