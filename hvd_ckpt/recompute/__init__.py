"""Activation checkpointing: the forward pass keeps some tensors, and the backward pass recomputes the others.

Functions and segments, run again as a whole:

    checkpoint     ``checkpoint``
    sequential     chains of layers in segments
    function       ``CheckpointFunction``: one autograd node
    region         a function with the modules that it can reach, and its passes
    state          random state and the like, restored for each recomputation (PyTorch's own by its checkpoint)
    environment    settings and modes, restored with it
    written        tensors that a first pass has written
    containers     nested arguments and results

Single calls, dropped and replayed:

    calls          facts about torch functions: which can be repeated
    tape           records the calls of a block, and drops results
    replay         runs dropped calls again
    keeper         tensors that are kept for that
    saved          kept masks in bits

Verification, and heads of language models:

    watch          tensors that autograd saves in a region
    verify         whether the recomputation has given the same
    cross_entropy  the cross entropy of a linear head in chunks
"""

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
