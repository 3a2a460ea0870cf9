"""The arguments of a sharded optimizer, and equal weights at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hvd_ckpt.collectives.asynchronous import ranks_of
from hvd_ckpt.collectives.formats import FP32, WireFormat, wire_formats
from hvd_ckpt.processes.grid import features_of_job
from hvd_ckpt.reduction.broadcast import broadcast_tensors
from hvd_ckpt.utils.rules import check
from hvd_ckpt.utils.text import stage_name, stage_of

OFFLOADS = ("optimizer", "parameters")


def check_stage(
    shard: object,
    offload: str | None,
    wire: str | Mapping[str, str],
    further: Mapping[str, Any] = MappingProxyType({"model": True}),
) -> tuple[int, WireFormat, WireFormat]:
    """The stage, and the communication formats of gradients and parameters.

    Args:
        further: what else the caller gives to the rules.

    Raises:
        ValueError: an argument is unknown, or does not go with another one.
    """
    stage = stage_of(shard)
    gradients, parameters = wire_formats(wire)
    if offload not in (None, *OFFLOADS):
        raise ValueError(f"offload must be None, 'optimizer' or 'parameters', not {offload!r}")
    check({
        **features_of_job(),
        **further,
        "shard": stage_name(stage),
        "offload": offload,
        "wire": None if gradients is parameters is FP32 else wire,
        "wire of gradients": None if gradients is FP32 else wire,
    })  # fmt: skip
    return stage, gradients, parameters


def start_alike(
    named: Sequence[tuple[str, torch.Tensor]], model: torch.nn.Module | None, members: Any, name: str
) -> None:
    """Gives parameters, and those and the buffers of the model where it is known, the values of the first rank. Collective."""
    tensors = {id(parameter): parameter for _, parameter in named}
    if model is not None:
        tensors.update((id(tensor), tensor) for tensor in (*model.parameters(), *model.buffers()))
    broadcast_tensors(tensors.values(), ranks_of(members)[0], name, members)
