"""State that each rank has of its own, in Lightning's checkpoints."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

import hvd_ckpt as hc
from hvd_ckpt.snapshots.random_state import random_state
from hvd_ckpt.utils.own_state import load_own_state, own_state


def states_of_ranks(module: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """What a checkpoint has of all ranks: their random state, state of modules and metrics, and order of reduction. Collective."""
    metrics = [(name, metric) for name, metric in module.named_modules() if isinstance(metric, Metric)]
    state = {
        "random": random_state(),
        "module": own_state(module),
        # What metrics have counted on this rank, which no state_dict() has.
        "metrics": {name: (metric.update_count, metric.metric_state) for name, metric in metrics},
        "reduction": [optimizer.reduction_state_dict() for optimizer in optimizers],
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # As bytes, since unsigned integers of random states cannot be pickled.
    stored = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return {"ranks": hc.allgather_object(stored)}


def load_states(
    state: Mapping[str, Any] | None, module: nn.Module, optimizers: Sequence[Any], objects: bool
) -> Any:
    """Loads what :func:`states_of_ranks` returned; returns the random state, or None where there were other ranks.

    Args:
        objects: whether extra states of modules may contain objects, which are unpickled.
    """
    if state is None or len(state["ranks"]) != hc.size():
        return None  # each rank draws new random numbers
    stored = io.BytesIO(state["ranks"][hc.rank()].numpy().tobytes())
    of_rank = torch.load(stored, weights_only=not objects)
    for optimizer, reduction in zip(optimizers, of_rank["reduction"]):
        optimizer.load_reduction_state_dict(reduction)
    load_own_state(module, of_rank["module"])
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and name in of_rank["metrics"]:
            metric._update_count, values = of_rank["metrics"][name]
            vars(metric).update(values)
    return of_rank["random"]
