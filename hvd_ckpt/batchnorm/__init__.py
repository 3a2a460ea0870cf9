"""Batch norm under recomputation: running statistics that count each batch once, deferred and synchronized batch norm."""

from hvd_ckpt.batchnorm.deferred import DeferredBatchNorm, commit_batch_norm
from hvd_ckpt.batchnorm.synchronized import SyncBatchNorm

__all__ = ["DeferredBatchNorm", "SyncBatchNorm", "commit_batch_norm"]
