"""What a training step takes on each of any number of ranks, worked out before there is one.

trace       one forward and backward pass, measured, cut into stretches
flows       what each stage holds along that trace
gathering   the same for stage 3
optimizers  what an optimizer holds and allocates, measured on small tensors
states      model states by the layout
result      what an estimate says
estimator   all of it together
"""

from hvd_ckpt.sharding.estimate.estimator import PRECISIONS, Estimator, estimate_memory
from hvd_ckpt.sharding.estimate.optimizers import check_optimizer
from hvd_ckpt.sharding.estimate.result import PARTS, MemoryEstimate

__all__ = ["PARTS", "PRECISIONS", "Estimator", "MemoryEstimate", "check_optimizer", "estimate_memory"]
