"""Running statistics that count each batch once, although recomputation runs the module again.

There are two ways. :class:`DeferredBatchNorm` is made for recomputation and micro-batches: it collects statistics outside of
recomputations, and updates the running statistics at the end of the mini-batch. All other normalization modules get scratch copies
of their buffers in recomputations, as any module whose first pass writes buffers (:mod:`hvd_ckpt.recompute.state`).
:func:`statistics_version` tells whether a pass has written them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.batchnorm.synchronized import ForAnyShape, average_factor, check_shape
from hvd_ckpt.utils.frames import is_recomputing
from hvd_ckpt.utils.torch_private import (
    AnyBatchNorm,
    DisableTorchFunction,
    NormBase,
    disable_current_modes,
    disable_dynamo,
)

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_PENDING = ("pending_count", "pending_mean", "pending_deviations")
_COUNTING_FORWARDS = ("torch.", "horovod.", "hvd_ckpt.")

Buffers = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


class DeferredBatchNorm(ForAnyShape):
    """Batch norm whose running statistics are those of mini-batches, although its inputs are micro-batches.

    In training mode, it normalizes an input of shape (N, C, ...) by the statistics of the input, as ``nn.BatchNorm1d``, ``2d`` and
    ``3d`` do. The running statistics change when :func:`commit_batch_norm` ends the mini-batch. Then they are updated by the mean
    and the unbiased variance over all inputs since the last commit, as if these were one batch (up to rounding).
    ``num_batches_tracked`` counts mini-batches. Recomputations do not count. Deferred batch norm comes from torchgpipe (Kim et al.,
    2020). Statistics are pooled by the formula of Chan, Golub and LeVeque (1979), in float64.

    The statistics of an unfinished mini-batch are buffers, which move and are copied with the module. They are not in its
    ``state_dict``, which has the keys of ``nn.BatchNorm2d``. Loading a ``state_dict`` drops them.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in ``nn.BatchNorm2d``.

    Raises:
        ValueError: an input has fewer than 2 dimensions, another number of channels, or, in training mode, a single value per
            channel.
    """

    # From a micro-batch to the running statistics:
    #
    #     forward(), first pass       the kernel leaves mean and variance of the input in two scratch tensors
    #       _observe()                merges them into count n, mean m and sum of squared deviations d of the mini-batch so far:
    #                                 with those of the input (k, a, b) and delta = a - m
    #                                     n' = n + k    m' = m + delta * k / n'    d' = d + b + delta^2 * n * k / n'
    #     forward(), recomputation    the same kernel and scratch tensors, so that autograd saves the same tensors; no _observe()
    #     commit_batch_norm()         merges those of all ranks by the same formula, if asked to, then
    #       _commit()                 moves running_mean towards m and running_var towards d / (n - 1), and starts anew

    pending_count: Tensor
    pending_mean: Tensor
    pending_deviations: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    @classmethod
    def convert(cls, model: Model) -> Model:
        """Converts each ``nn.BatchNorm1d``, ``2d`` and ``3d`` in ``model``, or the model itself, to a deferred batch norm.

        The modules remain the same objects with their parameters, buffers, hooks and modes, so an existing optimizer stays valid.
        Subclasses and synchronized batch norms are not converted. Convert before planning, since a plan depends on the functions
        that its blocks call.

        Returns:
            ``model``.

        Raises:
            ValueError: a lazy batch norm is not initialized.
        """
        for name, module in model.named_modules():
            check_shape(name, module)
            if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                module.__class__ = cls
                module._begin()
        return model

    def _begin(self) -> None:
        """Registers the empty statistics of a mini-batch. As buffers, they are moved, copied and restored with the module."""
        if self.running_mean is not None:
            zeros = torch.zeros_like(self.running_mean, dtype=torch.float64)
            self.register_buffer("pending_count", torch.zeros_like(zeros[0]), persistent=False)
            self.register_buffer("pending_mean", zeros, persistent=False)
            self.register_buffer("pending_deviations", zeros.clone(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        return self._observed(input)

    @disable_dynamo
    def _observed(self, input: Tensor) -> Tensor:
        # The kernel writes the statistics of the input into these tensors. Autograd saves them, so recomputations need them too.
        with DisableTorchFunction():
            assert self.running_mean is not None
            mean, variance = self.running_mean.new_zeros(2, self.num_features).unbind()
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not is_recomputing():
            # Hidden from code that matches the operations of a recomputation with those of the first pass.
            with DisableTorchFunction(), disable_current_modes(), torch.no_grad():
                self._observe(mean, variance, input.numel() // self.num_features)
        return output

    def _observe(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if count == 0:
            return
        # A copy, since the next line changes it in place. As a number, it would make the host wait for a GPU in each layer.
        before = self.pending_count.clone()
        self.pending_count += count
        distance = mean.double() - self.pending_mean
        self.pending_mean += distance * (count / self.pending_count)
        self.pending_deviations += variance.double() * (count - 1)
        self.pending_deviations += distance.square() * (before * count / self.pending_count)

    def _commit(self, count: float, mean: Tensor, deviations: Tensor) -> None:
        """Updates the running statistics by a mini-batch of ``count`` values per channel.

        Args:
            deviations: sums of squared deviations from the mean, (channels,).
        """
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        if count > 0:
            self.num_batches_tracked.add_(1)
            factor = average_factor(self)
            self.running_mean.lerp_(mean.to(self.running_mean), factor)
            self.running_var.lerp_((deviations / (count - 1)).to(self.running_var), factor)
        self._forget()

    def _forget(self) -> None:
        for name in _PENDING:
            if name in self._buffers:
                getattr(self, name).zero_()

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self._forget()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in _PENDING:
            if name in self._buffers:  # stay in float64 if the model is cast
                self._buffers[name] = getattr(self, name).double()
        return self


def commit_batch_norm(model: nn.Module, across_ranks: bool = False, discard: bool = False) -> None:
    """Ends a mini-batch: each :class:`DeferredBatchNorm` in ``model`` updates its running statistics by its inputs since the last
    commit. A module without inputs does not change.

    Call it between the last backward pass of a mini-batch and the first forward pass of the next.

    Args:
        model: the model.
        across_ranks: whether to pool the statistics of all ranks. Collective, with one allgather for all modules. A rank without
            inputs takes part.
        discard: whether to ignore the inputs of this rank, such as a sample that only fills a batch.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, DeferredBatchNorm) and module.running_mean is not None
    ]
    if not norms:
        return
    with torch.no_grad():
        if discard:
            for module in norms:
                module._forget()
        device = norms[0].pending_mean.device
        sizes = [module.num_features for module in norms]
        counts = torch.stack([module.pending_count.to(device) for module in norms])
        means = torch.cat([module.pending_mean.to(device) for module in norms])
        deviations = torch.cat([module.pending_deviations.to(device) for module in norms])
        if across_ranks and hvd.size() > 1:
            counts, means, deviations = _pooled(counts, means, deviations, torch.tensor(sizes, device=device))
        every_mean, every_deviation = (torch.split_with_sizes(both, sizes) for both in (means, deviations))
        for module, *seen in zip(norms, counts.tolist(), every_mean, every_deviation):
            module._commit(*seen)


def _pooled(
    counts: Tensor, means: Tensor, deviations: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools the statistics of all ranks; the result has the same bits on every rank."""
    packed = torch.cat([counts, means, deviations]).unsqueeze(0)
    rows: Tensor = hvd.allgather(packed, name="hvd_ckpt.commit_batch_norm")
    modules = len(counts)
    all_counts, all_means, all_deviations = rows[:, :modules], *rows[:, modules:].chunk(2, dim=1)
    weights = all_counts.repeat_interleave(sizes, dim=1)
    total = weights.sum(0).clamp(min=1)
    mean = (all_means * weights).sum(0) / total
    deviation = (all_deviations + weights * (all_means - mean).square()).sum(0)
    return all_counts.sum(0), mean, deviation


def statistics_version(module: nn.Module, name: str) -> Any:
    """A value that differs before and after a pass that has updated a buffer of a normalization module past its version counter.

    Kernels of batch norm update running statistics past their version counters, but the module also counts the batch in
    ``num_batches_tracked``. An instance norm does not count, and a subclass with its own forward may not. Such modules are taken to
    have run if they are in training mode.

    Returns:
        The value; None for other modules and buffers.
    """
    if name not in STATISTICS or not isinstance(module, NormBase) or isinstance(module, DeferredBatchNorm):
        return None
    counter = module._buffers.get("num_batches_tracked")
    counts = isinstance(module, AnyBatchNorm) and type(module).forward.__module__.startswith(
        _COUNTING_FORWARDS
    )
    if counts and counter is not None and not counter.is_inference():
        return id(counter), counter._version
    return object() if module.training else None
