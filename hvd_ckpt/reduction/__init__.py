"""How gradients meet: each is allreduced once, in a fixed order."""

from .broadcast import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .compression import Compression
from .elastic import register as _register_elastic
from .optimizer import join
from .stats import ReductionStats, StepStats

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
