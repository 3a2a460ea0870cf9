"""Clipping by the norm of all gradients, sharded or not."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvd_ckpt.processes import whole_model
from hvd_ckpt.reduction.machine import owner_of
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.gradients import whole_gradients
from hvd_ckpt.sharding.layout import Piece
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.utils.torch_private import foreach_mul_, foreach_norm


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients of a ``DistributedOptimizer``, sharded or not. Call it before ``step()``.

    Gradients that are not reduced yet are reduced first. If several optimizers have a parameter, the one that was created last
    reduces it. If gradients are split over the ranks (stages 2 and 3), the norm takes one more reduction. The call is collective if
    a parameter belongs to a ``DistributedOptimizer``. If none does, it is the same as torch's function.

    Args:
        parameters: parameters of the model, one parameter, or an optimizer: all of its parameters.
        max_norm, norm_type, error_if_nonfinite: as in torch.

    Returns:
        The norm of all gradients together before clipping, in the dtype that torch gives it. It is the same on every rank.

    If layers are split (:func:`hvd_ckpt.tensor_parallel`), the norm is that of the whole model, the same on all parts.

    Raises:
        RuntimeError: the norm is inf or nan and ``error_if_nonfinite`` is set; on every rank.
        ValueError: the gradients of several optimizers are split, or other parameters have gradients, too.
    """
    chosen = _parameters(parameters)
    owners = [parameters] if isinstance(parameters, ReducedOptimizer) else owners_of(chosen)
    for optimizer in owners:
        optimizer.reduce_for_caller()
    split = split_gradients(owners, chosen)
    if split is None and whole_model.is_split():
        norm = _clip_in_parts(chosen, max_norm, norm_type, error_if_nonfinite)
    elif split is None:
        norm = torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
    if split is None:
        # All ranks have scaled alike. Without this, step() would take the fingerprint of each gradient to find that out.
        for optimizer in owners:
            optimizer.note_changes()
        return norm
    as_whole = owners[0].replicas is not None  # which promise torch's bits
    total = split.norm_as_whole(norm_type) if as_whole else split.norm(float(norm_type)) or 0.0
    result = torch.as_tensor(total, dtype=norm_dtype(split.dtypes))
    _check_finite(result, norm_type, error_if_nonfinite)
    if isinstance(total, torch.Tensor):
        torch.nn.utils.clip_grads_with_norm_([piece.parameter for piece in split.pieces], max_norm, total)
    else:
        split.clip(float(max_norm), total)
    return result


def _clip_in_parts(
    chosen: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Clips whole gradients where layers are split: slices count on all parts, and what each part has whole counts once."""
    trained = [parameter for parameter in chosen if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, norm_type).double() for gradient in gradients]
    total = torch.zeros((), dtype=torch.float64)
    if norms:
        total = torch.linalg.vector_norm(whole_model.norms(torch.stack(norms), trained, norm_type), norm_type)
    total = total.to(norm_dtype(gradient.dtype for gradient in gradients))
    _check_finite(total, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return total


def _check_finite(total: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            f"To disable this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
        )


def _parameters(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.optim.Optimizer):
        return [parameter for group in given.param_groups for parameter in group["params"]]
    return [given] if isinstance(given, torch.Tensor) else list(given)


def owners_of(chosen: Iterable[torch.Tensor]) -> list[ReducedOptimizer]:
    """The distributed optimizers that the parameters belong to, in an order that is the same on every rank."""
    owners = {id(owner): owner for parameter in chosen if (owner := owner_of(parameter)) is not None}
    return sorted(owners.values(), key=lambda owner: owner.identity)


def split_gradients(
    owners: Sequence[ReducedOptimizer], chosen: Sequence[torch.Tensor]
) -> SplitGradients | None:
    """The gradients of the parameters, if they are split over the ranks, else None.

    Args:
        owners: the optimizers of the parameters; their gradients are reduced.

    Raises:
        ValueError: the gradients of several optimizers are split, or other parameters have gradients, too.
    """
    split = [owner for owner in owners if isinstance(owner, ShardedOptimizer) and owner.shard_stage > 1]
    if not split:
        return None
    if len(owners) > 1 or any(
        parameter.grad is not None and split[0].sharding.layout.index(parameter) is None
        for parameter in chosen
    ):
        raise ValueError(
            "clip_grad_norm_: the gradients of these parameters are not all split by one optimizer; clip those of each optimizer "
            "by themselves"
        )
    return SplitGradients(split[0], chosen)


def norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that torch gives the norm of gradients of these dtypes together: real; the default dtype without gradients."""
    real = [dtype.to_real() for dtype in dtypes]
    return functools.reduce(torch.promote_types, real) if real else torch.get_default_dtype()


class SplitGradients:
    """Gradients of which each rank has its shards (stages 2 and 3).

    Attributes:
        pieces: those of this rank that have gradients.
    """

    def __init__(self, optimizer: ShardedOptimizer, chosen: Sequence[torch.Tensor]) -> None:
        sharding = self.sharding = optimizer.sharding
        indices = (sharding.layout.index(parameter) for parameter in chosen)
        wanted = dict.fromkeys(index for index in indices if index is not None)
        self._exchange = sharding.exchange
        self._in_order = [index for index in wanted if optimizer.reducer.used[index]]
        # What is added up over the ranks must be in one order on all; torch's norm has
        # the order in which parameters were given.
        self._used = sorted(self._in_order)
        self.pieces = [
            piece for piece in sharding.pieces if piece.index in wanted and piece.parameter.grad is not None
        ]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of the parameters that have gradients."""
        return {self.sharding.layout.parameters[index].dtype for index in self._used}

    def norm(self, order: float) -> float | None:
        """The norm of these gradients together, or None if no rank has any. Collective.

        It is that of the norms of the parameters, as torch has it: with order 0 the number of those that are not all zero.
        """
        if not self._used:
            return None
        if math.isinf(order):
            sign = math.copysign(1.0, order)
            gradients = [_gradient(piece).abs() for piece in self.pieces]
            values = torch.cat(gradients) if gradients else torch.empty(0, dtype=torch.float32)
            # A nan would make the maximum over the ranks depend on their order, so it travels as a flag of its own.
            known = values[~values.isnan()]
            greatest = (sign * known).max().item() if known.numel() else -math.inf
            own = torch.tensor([greatest, known.numel() < values.numel()], dtype=torch.float64)
            of_part = torch.tensor(self._exchange.maximum(own, "norm"), dtype=torch.float64)
            greatest, has_nan = whole_model.maximum(of_part).tolist()
            return math.nan if has_nan else sign * greatest
        place = {index: number for number, index in enumerate(self._used)}
        sums = torch.zeros(len(place), dtype=torch.float64)
        for piece in self.pieces:
            values = _gradient(piece).abs().to(torch.float64)
            sums[place[piece.index]] += ((values != 0) if order == 0 else values**order).sum().item()
        sums = torch.tensor(self._exchange.sum(sums, "norm"), dtype=torch.float64)
        # Sums of powers of the slices add up to those of the whole.
        sums = whole_model.norms(sums, [self.sharding.layout.parameters[index] for index in self._used], 1.0)
        return float(sums.count_nonzero() if order == 0 else sums.sum() ** (1.0 / order))

    def norm_as_whole(self, order: float) -> torch.Tensor:
        """The norm with the bits that ``torch.nn.utils.get_total_norm`` gives for whole gradients. Collective.

        They are gathered, one group at a time.
        """
        if not self._in_order:
            return torch.tensor(0.0, dtype=torch.float32)
        layout, weights = self.sharding.layout, self.sharding.store.shards
        shards: dict[int, torch.Tensor] = {}
        for position in {layout.group_of[index].position for index in self._used}:
            # Gradients have the dtype of what is stepped: of the masters where there are any.
            stepped = self.sharding.masters.by_group.get(position, weights[position])
            shards[position] = torch.zeros_like(stepped)
        for piece in self.pieces:
            piece.span.of(shards[layout.group_of[piece.index].position]).copy_(_gradient(piece))
        norms = {
            index: foreach_norm([gradient], order)[0]
            for index, gradient in whole_gradients(layout, self._exchange, shards)
        }
        in_order = torch.stack([norms[index] for index in self._in_order])
        total: torch.Tensor = torch.linalg.vector_norm(in_order, order)
        return total

    def clip(self, max_norm: float, total: float) -> None:
        """Scales them as torch does for that norm of all gradients."""
        # A nan must reach the gradients, as in torch; what min() makes of one depends on the order of its arguments.
        coefficient = min(max_norm / (total + 1e-6), 1.0) if total == total else math.nan
        if self.pieces:
            foreach_mul_([_gradient(piece) for piece in self.pieces], coefficient)


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    return piece.parameter.grad
