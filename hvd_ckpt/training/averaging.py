"""The exponential moving average of a run's weights: updated after each step, evaluated, in snapshots, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvd_ckpt.sharding.averaging import AveragedWeights

__all__ = ["common_state", "load", "of_run", "shard_state"]


def of_run(optimizer: Any, decay: float | None) -> AveragedWeights | None:
    """The average of a run, if it has one.

    Args:
        optimizer: a ``DistributedOptimizer`` with the weights that the run begins with.
        decay: of the average; None for a run without one.
    """
    if decay is None:
        return None
    return AveragedWeights(optimizer, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


def common_state(average: AveragedWeights | None, sharded: bool) -> dict[str, Any] | None:
    """What is the same on every rank: the number of updates, and where nothing is split the average by the parameters' names."""
    if average is None:
        return None
    state = average.state_dict()
    names = [name for name, _, _ in state["pieces"]]
    whole = None if sharded else {names[number]: one for number, one in state["averages"].items()}
    return {"n_averaged": state["n_averaged"], "averages": whole}


def shard_state(average: AveragedWeights | None) -> dict[int, Tensor] | None:
    """This rank's part of the average, by the number of its piece."""
    return None if average is None else average.state_dict()["averages"]


def load(
    average: AveragedWeights, common: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None
) -> None:
    """Loads the average of a snapshot; without one it begins anew, with the next update. Collective.

    Args:
        common: what is the same on every rank, checked.
        parts: of the ranks, if the run was sharded, as :func:`~hvd_ckpt.snapshots.resharding.read_parts` gives them.
    """
    state = common.get("ema")
    if state is None:
        return
    if parts is None:
        whole = state["averages"]
        pieces = [(name, 0, one.numel()) for name, one in whole.items()]
        parts = [{"pieces": pieces, "averages": dict(enumerate(whole.values()))}]
    average.load_state_dict([{**part, "n_averaged": state["n_averaged"]} for part in parts])
