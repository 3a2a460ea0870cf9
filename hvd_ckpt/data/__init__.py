"""Training data as the library sees it: batches, objectives, the protocol of data sets, the order of samples.

objectives   batches, and losses with the number of terms that they are a mean of
dataset      the protocol of data sets, random numbers by sample, splits
sampler      the order of samples, whose position is one integer, and loaders
"""

from hvd_ckpt.data.objectives import Batch, Objective
from hvd_ckpt.data.sampler import DataLoader, DistributedSampler

__all__ = ["Batch", "DataLoader", "DistributedSampler", "Objective"]
