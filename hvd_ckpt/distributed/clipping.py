"""Clipping by the norm of all gradients, sharded or not."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvd_ckpt.processes import whole_model
from hvd_ckpt.reduction.machine import owner_of
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.sharding.layout import Piece
from hvd_ckpt.sharding.optimizer import ShardedOptimizer
from hvd_ckpt.utils.torch_private import foreach_norm


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for gradients of a ``DistributedOptimizer``, sharded or not. Call it before ``step()``.

    Gradients that are not reduced yet are reduced first. If several optimizers have a parameter, the one that was created last
    reduces it. If gradients are split over the ranks (stages 2 and 3), the norm takes one more reduction. The call is collective if
    a parameter belongs to a ``DistributedOptimizer``. If none does, it is the same as torch's function.

    Args:
        parameters: parameters of the model, one parameter, or an optimizer: all of its parameters. One that is given twice, such as
            a tied weight of two modules, counts and is scaled twice, as in torch.
        max_norm, norm_type, error_if_nonfinite, foreach: as in torch; ``max_norm`` must be the same on every rank.

    Returns:
        The norm of all gradients together before clipping, in the dtype that torch gives it. It is the same on every rank.

    If layers are split (:func:`hvd_ckpt.tensor_parallel`), or the model is in stages (:class:`hvd_ckpt.Pipeline`), the norm is that
    of the whole model, the same on all parts and stages. Stages exchange the norm of each parameter, so it has the bits of a model
    without stages; with sharded gradients, they exchange one norm, and it is equal up to rounding.

    Raises:
        RuntimeError: the norm is inf or nan and ``error_if_nonfinite`` is set; on every rank.
        ValueError: the gradients of several optimizers are split, or other parameters have gradients, too.
    """
    if isinstance(parameters, torch.nn.Module):
        raise TypeError("clip_grad_norm_: parameters is a module: give its model.parameters()")
    if isinstance(parameters, torch.optim.Optimizer):
        chosen = [parameter for group in parameters.param_groups for parameter in group["params"]]
    else:
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for one in chosen:
        if not isinstance(one, torch.Tensor):
            raise TypeError(
                f"clip_grad_norm_: parameters has a {type(one).__name__}: give parameters, such as model.parameters()"
            )
    owners = [parameters] if isinstance(parameters, ReducedOptimizer) else _owners_of(chosen)
    for optimizer in owners:
        if optimizer.reducer is not None:  # ranks compare it with their flags
            optimizer.reducer.note_limit(float(max_norm))
        optimizer.reduce_for_caller()
    split = _split_gradients(owners, chosen)
    if split is None:
        clip = _clip_whole if whole_model.is_split() else torch.nn.utils.clip_grad_norm_
        try:
            norm = clip(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
        except NotImplementedError as error:
            if not any(one.grad is not None and one.grad.is_sparse for one in chosen):
                raise
            raise ValueError(
                "clip_grad_norm_: a gradient is sparse, and PyTorch has no norm of it: pass sparse_as_dense=True to the optimizer"
            ) from error
        # All ranks have scaled alike. Without this, step() would take the fingerprint of each gradient to find that out.
        for optimizer in owners:
            optimizer.note_changes()
        return norm
    as_whole = owners[0].replicas is not None  # which promise torch's bits
    total = split.norm_as_whole(norm_type) if as_whole else split.norm(float(norm_type))
    dtypes = split.dtypes
    if not isinstance(total, torch.Tensor):
        norms, dtypes = whole_model.over_stages(total, dtypes)  # None of a stage without gradients
        there = torch.tensor([norm for norm in norms if norm is not None], dtype=torch.float64)
        joined = (
            there.sum() if norm_type == 0 or len(there) < 2 else torch.linalg.vector_norm(there, norm_type)
        )
        total = float(joined)
    result = torch.as_tensor(total, dtype=_norm_dtype(dtypes))
    _check_finite(result, norm_type, error_if_nonfinite)
    split.clip(float(max_norm), torch.as_tensor(total, dtype=None if as_whole else torch.float64), foreach)
    return result


def _clip_whole(
    chosen: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Clips whole gradients by the norm of a model of which this process has a part."""
    norms, dtypes = whole_model.gradient_norms(chosen, norm_type)
    # In the order of the whole model's parameters, as torch adds them, with the same bits.
    norms = norms.to(_norm_dtype(dtypes))
    total = torch.linalg.vector_norm(norms, norm_type) if len(norms) else norms.new_zeros(())
    _check_finite(total, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, total, foreach)
    return total


def _check_finite(total: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            f"To disable this error and scale the gradients by the non-finite norm anyway, set error_if_nonfinite=False"
        )


def _owners_of(chosen: Iterable[torch.Tensor]) -> list[ReducedOptimizer]:
    """The distributed optimizers that the parameters belong to, in an order that is the same on every rank."""
    owners = {id(owner): owner for parameter in chosen if (owner := owner_of(parameter)) is not None}
    return sorted(owners.values(), key=lambda owner: owner.identity)


def _split_gradients(
    owners: Sequence[ReducedOptimizer], chosen: Sequence[torch.Tensor]
) -> SplitGradients | None:
    """The gradients of the parameters, which are reduced, if they are split over the ranks."""
    split = [owner for owner in owners if isinstance(owner, ShardedOptimizer) and owner.shard_stage > 1]
    if not split:
        return None
    layout = split[0].sharding.layout
    if len(owners) > 1 or any(
        parameter.grad is not None and layout.index(parameter) is None for parameter in chosen
    ):
        raise ValueError(
            "clip_grad_norm_: the gradients of these parameters are not all split by one optimizer; clip those of each optimizer "
            "by themselves"
        )
    return SplitGradients(split[0], chosen)


def _norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that torch gives the norm of gradients of these dtypes together: real; the default dtype without gradients."""
    real = [dtype.to_real() for dtype in dtypes]
    return functools.reduce(torch.promote_types, real) if real else torch.get_default_dtype()


class SplitGradients:
    """Gradients of which each rank has its shards (stages 2 and 3); ``pieces`` are those of this rank."""

    def __init__(self, optimizer: ShardedOptimizer, chosen: Sequence[torch.Tensor]) -> None:
        sharding = self.sharding = optimizer.sharding
        indices = (sharding.layout.index(parameter) for parameter in chosen)
        self._exchange = sharding.exchange
        self._in_order = [index for index in indices if index is not None and optimizer.reducer.used[index]]
        self._times = Counter(self._in_order)  # as torch counts and scales a gradient that is given twice
        # What is added up over the ranks must be in one order on all; torch's norm has
        # the order in which parameters were given.
        self._used = sorted(self._times)
        # Placeholders stand in the others.
        used = set(self._used)
        self.pieces = [
            piece for piece in sharding.pieces if piece.index in used and piece.parameter.grad is not None
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
        times = torch.tensor([self._times[index] for index in self._used], dtype=torch.float64)
        return float(times[sums != 0].sum() if order == 0 else (times * sums).sum() ** (1.0 / order))

    def norm_as_whole(self, order: float) -> torch.Tensor:
        """The norm with the bits that ``torch.nn.utils.get_total_norm`` gives for whole gradients. Collective.

        They are gathered, one group at a time.
        """
        if not self._in_order:
            return torch.tensor(0.0, dtype=torch.float32)
        layout, weights = self.sharding.layout, self.sharding.store.shards
        shards: dict[int, torch.Tensor] = {}
        for position in sorted({layout.group_of[index].position for index in self._used}):
            # Gradients have the dtype of what is stepped: of the masters where there are any.
            stepped = self.sharding.masters.by_group.get(position, weights[position])
            shards[position] = torch.zeros_like(stepped)
        for piece in self.pieces:
            piece.span.of(shards[layout.group_of[piece.index].position]).copy_(_gradient(piece))
        norms: dict[int, torch.Tensor] = {}
        for position, shard in shards.items():
            group = layout.groups[position]
            flat = torch.empty(group.padded, dtype=shard.dtype, device=shard.device)
            self._exchange.all_gather(shard, flat, f"gradients.{position}.whole").wait()
            for index, gradient in zip(group.indices, layout.views(group, flat)):
                norms[index] = foreach_norm([gradient], order)[0]
        in_order = torch.stack([norms[index] for index in self._in_order])
        total: torch.Tensor = torch.linalg.vector_norm(in_order, order)
        return total

    def clip(self, max_norm: float, total: torch.Tensor, foreach: bool | None) -> None:
        """Scales them as torch does for that norm of all gradients, each as often as its parameter was given."""
        for turn in range(max(self._times.values(), default=0)):
            pieces = [piece.parameter for piece in self.pieces if self._times[piece.index] > turn]
            torch.nn.utils.clip_grads_with_norm_(pieces, max_norm, total, foreach)


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.parameter.grad is not None
    return piece.parameter.grad
