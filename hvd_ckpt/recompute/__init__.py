"""What the forward pass keeps, and how the backward pass gets the rest back."""
from hvd_ckpt.recompute.checkpoint import checkpoint, is_checkpointing, is_recomputing
from hvd_ckpt.recompute.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "checkpoint", "is_checkpointing", "is_recomputing"]
