"""What the forward pass keeps, and how the backward pass gets the rest back."""

from hvd_ckpt.frames import without_recomputation
from hvd_ckpt.recompute.checkpoint import checkpoint, is_checkpointing, is_recomputing
from hvd_ckpt.recompute.function import CheckpointFunction
from hvd_ckpt.recompute.sequential import CheckpointSequential, checkpoint_sequential

__all__ = [
    "CheckpointFunction",
    "CheckpointSequential",
    "checkpoint",
    "checkpoint_sequential",
    "is_checkpointing",
    "is_recomputing",
    "without_recomputation",
]
