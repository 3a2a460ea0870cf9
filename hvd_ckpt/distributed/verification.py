"""``verify``: what is compared during training, and a comparison of all weights now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt.collectives.agreement import raise_on_replica
from hvd_ckpt.recompute import verify_recomputation
from hvd_ckpt.reduction.consistency import WeightsDiffer, check_equal_weights
from hvd_ckpt.reduction.weights import verify_weights
from hvd_ckpt.utils.text import check_instance


def verify(
    model: torch.nn.Module | None = None,
    *,
    recomputation: str | int | None = None,
    weights: bool | None = None,
    ignore: Iterable[torch.Tensor] = (),
    process_set: Any = global_process_set,
) -> None:
    """Sets what is compared from now on, and compares the weights of a model now. Call it on every rank.

    Args:
        model: a module, the same on every rank, whose parameters are compared now, including frozen ones; a tied parameter is
            compared once, and buffers are not. Of parameters that are split over the ranks (stage 3) only names, shapes and dtypes
            are compared. Collective; changes nothing. Ranks exchange 64 bits for each parameter at most.
        recomputation: passes whose recomputed tensors are compared, bit for bit, with those of the first pass. ``"first"`` (the
            default): the first training pass through each region in this process, and again for other modules or another training
            mode. ``"always"``: every pass. ``"never"``: no pass. A number n: every n-th pass. The environment variable
            ``HVD_CKPT_VERIFY_RECOMPUTATION`` sets the default. It covers :func:`hvd_ckpt.checkpoint` in both variants,
            ``CheckpointFunction``, segments, pipeline stages and plans.
        weights: whether a ``DistributedOptimizer`` compares in each step the bits of a part of the weights that its ranks are about
            to update, and the next step the next part; and in each step the options of its groups, such as learning rates. It does
            by default; ``HVD_CKPT_VERIFY_WEIGHTS=0`` in the environment turns it off.
        ignore: with ``weights``, parameters whose gradients are reduced, but whose values may differ between ranks.
        process_set: the ranks that compare the model.

    Raises:
        WeightsDiffer: the weights of the model, their names, shapes or dtypes differ. Raised on every rank, of every pipeline stage
            and part; names the first parameter in the order of ``named_parameters()``, and the ranks in the minority, with their
            hosts.
        TypeError: ``model`` is not a module.
        ValueError: ``recomputation`` has another value, a parameter has no dense values, or this rank is not in ``process_set``.
    """
    if model is not None:
        check_instance(model, torch.nn.Module, "model must be a torch.nn.Module")
    if recomputation is not None:
        verify_recomputation(recomputation)
    if weights is not None:
        verify_weights(weights, ignore=ignore)
    if model is not None:
        difference: Exception | None = None
        try:
            check_equal_weights(model, process_set)
        except (WeightsDiffer, ValueError) as error:
            difference = error
        # Pipeline stages and parts have worlds of their own, in which their ranks compare.
        raise_on_replica(difference)
