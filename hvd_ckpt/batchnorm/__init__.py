"""Batch norm under recomputation: running statistics that count each batch once.

deferred      statistics of the first pass, applied once for each step
synchronized  statistics over all ranks

Ordinary batch norms need none of it: :mod:`hvd_ckpt.recompute.state` keeps the buffers of all modules from a second update.
"""

from hvd_ckpt.batchnorm.deferred import DeferredBatchNorm, commit_batch_norm
from hvd_ckpt.batchnorm.synchronized import SyncBatchNorm

__all__ = ["DeferredBatchNorm", "SyncBatchNorm", "commit_batch_norm"]
