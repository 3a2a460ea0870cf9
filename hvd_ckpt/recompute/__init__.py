"""Activation checkpointing: the forward pass keeps some tensors, and the backward pass recomputes the others.

Functions and segments, run again as a whole:

    checkpoint     ``checkpoint``
    reentrant      its reentrant variant: one autograd node
    function       ``CheckpointFunction``: the call of another project
    sequential     chains of layers in segments
    region         one checkpointed call, its first pass and its recomputations
    reach          modules and tensors that a function can reach
    state          random state and the like, restored for each recomputation
    written        tensors that a first pass has written
    containers     nested arguments and results

Both regions and single calls:

    environment    settings, modes and context variables, restored for each recomputation

Single calls, dropped and replayed:

    calls          facts about torch functions: which can be repeated
    tape           records the calls of a block, and drops results
    replay         runs dropped calls again
    keeper         tensors that are kept for that
    saved          masks in bits
    masks          random masks of dropped calls, so that a replay need not draw them again

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
