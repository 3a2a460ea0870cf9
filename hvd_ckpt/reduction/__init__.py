"""Gradient reduction: each gradient is allreduced once, in a fixed order; and collectives of objects and states."""

from hvd_ckpt.reduction.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from hvd_ckpt.reduction.communicator import Compression
from hvd_ckpt.reduction.construction import register_elastic as _register_elastic
from hvd_ckpt.reduction.stats import ReductionStats, StepStats

_register_elastic()

__all__ = [
    "Compression",
    "ReductionStats",
    "StepStats",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
]
