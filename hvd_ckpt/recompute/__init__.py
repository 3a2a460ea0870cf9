"""What the forward pass keeps, and how the backward pass gets the rest back."""

from hvd_ckpt.recompute.batchnorm import DeferredBatchNorm, commit_batch_norm
from hvd_ckpt.recompute.checkpoint import checkpoint, is_checkpointing, is_recomputing
from hvd_ckpt.recompute.frames import without_recomputation
from hvd_ckpt.recompute.function import CheckpointFunction
from hvd_ckpt.recompute.sequential import CheckpointSequential, checkpoint_sequential
from hvd_ckpt.recompute.sync_batch_norm import SyncBatchNorm

__all__ = [
    "CheckpointFunction",
    "CheckpointSequential",
    "DeferredBatchNorm",
    "SyncBatchNorm",
    "checkpoint",
    "checkpoint_sequential",
    "commit_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "without_recomputation",
]
