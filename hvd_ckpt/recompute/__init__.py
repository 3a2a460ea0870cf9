"""Activation checkpointing: the forward pass keeps some tensors, and the backward pass recomputes the others."""

from hvd_ckpt.recompute.checkpoint import checkpoint
from hvd_ckpt.recompute.cross_entropy import chunked_cross_entropy
from hvd_ckpt.recompute.function import CheckpointFunction
from hvd_ckpt.recompute.sequential import CheckpointSequential, checkpoint_sequential
from hvd_ckpt.recompute.verify import RecomputationMismatch, verify_recomputation
from hvd_ckpt.utils.frames import is_checkpointing, is_recomputing, without_recomputation

__all__ = [
    "CheckpointFunction",
    "CheckpointSequential",
    "RecomputationMismatch",
    "checkpoint",
    "checkpoint_sequential",
    "chunked_cross_entropy",
    "is_checkpointing",
    "is_recomputing",
    "verify_recomputation",
    "without_recomputation",
]
