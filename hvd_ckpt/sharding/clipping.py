"""Clipping by the norm of all gradients, wherever they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hvd_ckpt.reduction.optimizer import ReducedOptimizer, live_optimizers

from .optimizer import ShardedOptimizer

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients of a ``DistributedOptimizer``, sharded or not; before its ``step()``.

    Gradients that are not reduced yet are reduced first. Where they are split over the ranks (stages 2 and 3), the norm takes one
    more reduction. Collective, where a parameter is a distributed optimizer's; else it is torch's.

    Args:
        parameters: parameters of the model, one parameter, or an optimizer: all of its parameters.
        max_norm, norm_type, error_if_nonfinite: as in torch.

    Returns:
        The norm of all gradients together, before they were clipped; the same on every rank.

    Raises:
        RuntimeError: the norm is inf or nan and ``error_if_nonfinite`` is set; on every rank.
        ValueError: the gradients of several optimizers are split, or other parameters have gradients, too.
    """
    chosen = _parameters(parameters)
    owners, rest = _owners(chosen)
    for optimizer in owners:
        optimizer.reduce_for_caller()
    split = [
        optimizer
        for optimizer in owners
        if isinstance(optimizer, ShardedOptimizer) and optimizer.shard_stage > 1
    ]
    if not split:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
    if len(owners) > 1 or any(parameter.grad is not None for parameter in rest):
        raise ValueError(
            "clip_grad_norm_: the gradients of these parameters are not all split by one optimizer; clip those of each optimizer "
            "by themselves"
        )
    return _clip_shards(split[0], chosen, float(max_norm), float(norm_type), error_if_nonfinite)


def _parameters(given: Any) -> list[torch.Tensor]:
    if isinstance(given, ShardedOptimizer):
        return list(itertools.chain.from_iterable(given._sharding.groups))
    if isinstance(given, torch.optim.Optimizer):
        return [parameter for group in given.param_groups for parameter in group["params"]]
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _owners(chosen: Sequence[torch.Tensor]) -> tuple[list[ReducedOptimizer], list[torch.Tensor]]:
    """The distributed optimizers that have any of the parameters, the oldest first, and the parameters that none has."""
    left = {id(parameter): parameter for parameter in chosen}
    owners = []
    for optimizer in live_optimizers():
        own = {id(parameter) for parameter in _parameters(optimizer)}
        if not own.isdisjoint(id(parameter) for parameter in chosen):
            owners.append(optimizer)
            left = {key: parameter for key, parameter in left.items() if key not in own}
    return owners, list(left.values())


def _clip_shards(
    optimizer: ShardedOptimizer,
    chosen: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    sharding = optimizer._sharding
    wanted = {sharding.layout.index(parameter) for parameter in chosen}
    gradients = [
        piece.parameter.grad
        for piece in sharding.pieces
        if piece.index in wanted and piece.parameter.grad is not None
    ]
    norms = [
        torch.linalg.vector_norm(
            one.abs() if one.is_complex() else one, norm_type, dtype=torch.float64
        ).item()
        for one in gradients
    ]
    if norm_type == float("inf"):
        largest = torch.tensor([max(norms, default=0.0)], dtype=torch.float64)
        total = sharding.exchange.maximum(largest, "norm")[0]
    else:
        powers = torch.tensor([sum(norm**norm_type for norm in norms)], dtype=torch.float64)
        total = sharding.exchange.total(powers, "norm")[0] ** (1.0 / norm_type)
    result = torch.tensor(total, dtype=torch.float32)
    if error_if_nonfinite and not torch.isfinite(result):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            f"To disable this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
        )
    coefficient = min(max_norm / (total + 1e-6), 1.0) if total == total else float("nan")
    if gradients:
        torch._foreach_mul_(gradients, coefficient)
    return result
