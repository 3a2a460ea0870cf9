"""Running statistics that see each batch once, although recomputation runs the module again.

Two kinds of modules keep them. :class:`DeferredBatchNorm` is made for recomputation and micro-batches: it notes what it
sees outside of recomputations, and takes it into account at the end of the mini-batch. All others get scratch copies of
their buffers in recomputations, as any module does whose first pass writes buffers (:mod:`hvd_ckpt.recompute.state`), which
asks :func:`statistics_version` whether it did.
"""

from __future__ import annotations

from typing import Any, TypeVar

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.batchnorm.synchronized import ForAnyShape, average_factor
from hvd_ckpt.torch_private import (
    AnyBatchNorm,
    DisableTorchFunction,
    LazyNormBase,
    NormBase,
    disable_current_modes,
    disable_dynamo,
)
from hvd_ckpt.utils.frames import is_recomputing

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_PENDING = ("pending_count", "pending_mean", "pending_deviations")
_COUNTING_FORWARDS = ("torch.", "horovod.", "hvd_ckpt.")

Buffers = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


class DeferredBatchNorm(ForAnyShape):
    """Batch norm whose running statistics are those of mini-batches, though it sees micro-batches.

    In training mode it normalizes an input of shape (N, C, ...) by the input's own statistics, like ``nn.BatchNorm1d``,
    ``2d`` and ``3d``. The running statistics change when :func:`commit_batch_norm` ends the mini-batch: by mean and
    unbiased variance over all values that the module has seen since the last time, as if they had come in one batch (to
    rounding). ``num_batches_tracked`` counts mini-batches. A recomputation is not counted. Deferred batch norm is
    torchgpipe's (Kim et al., 2020); values are pooled by the formula of Chan, Golub and LeVeque (1979), in float64.

    The statistics of an unfinished mini-batch move and are copied with the module, but are not in its ``state_dict``,
    whose keys are those of ``nn.BatchNorm2d``; loading one drops it.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in ``nn.BatchNorm2d``.

    Raises:
        ValueError: an input of fewer than 2 dimensions, of another number of channels, or, in training mode, with a single
            value per channel.
    """

    pending_count: Tensor
    pending_mean: Tensor
    pending_deviations: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    @classmethod
    def convert(cls, model: Model) -> Model:
        """Makes every ``nn.BatchNorm1d``, ``2d`` and ``3d`` in ``model``, or the model itself, a deferred one.

        The modules stay the same objects, with their parameters, buffers, hooks and modes, so that an optimizer made before
        keeps working. Subclasses and synchronized batch norms stay what they are. Convert before planning: a plan knows the
        functions that its blocks call.

        Returns:
            ``model``.

        Raises:
            ValueError: a lazy batch norm has no shape yet.
        """
        for name, module in model.named_modules():
            if isinstance(module, LazyNormBase):
                raise ValueError(
                    f"The {type(module).__name__} '{name}' has no shape yet: run the model once before converting it."
                )
            if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                module.__class__ = cls
                module._begin()
        return model

    def _begin(self) -> None:
        """Nothing seen yet. Buffers, so that whoever moves, copies or restores buffers does so with these."""
        if self.running_mean is not None:
            zeros = torch.zeros_like(self.running_mean, dtype=torch.float64)
            self.register_buffer("pending_count", torch.zeros_like(zeros[0]), persistent=False)
            self.register_buffer("pending_mean", zeros, persistent=False)
            self.register_buffer("pending_deviations", zeros.clone(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training and self.running_mean is not None:
            return self._observed(input)
        return functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            0.0,
            self.eps,
        )

    @disable_dynamo
    def _observed(self, input: Tensor) -> Tensor:
        # The kernel leaves the input's statistics in these. Autograd saves them: every pass needs some.
        with DisableTorchFunction():
            assert self.running_mean is not None
            mean, variance = self.running_mean.new_zeros(2, self.num_features).unbind()
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not is_recomputing():
            # Hidden from those who match the operations of a recomputation with those of the first pass.
            with DisableTorchFunction(), disable_current_modes(), torch.no_grad():
                self._observe(mean, variance, input.numel() // self.num_features)
        return output

    def _observe(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if count == 0:
            return
        before = self.pending_count.clone()
        self.pending_count += count
        distance = mean.double() - self.pending_mean
        self.pending_mean += distance * (count / self.pending_count)
        self.pending_deviations += variance.double() * (count - 1)
        self.pending_deviations += distance.square() * (before * count / self.pending_count)

    def _commit(self, count: float, mean: Tensor, deviations: Tensor) -> None:
        """One mini-batch of ``count`` values per channel, with these sums of squared deviations from the mean."""
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
            if name in self._buffers:  # a cast of the model must not cost the sums their digits
                self._buffers[name] = getattr(self, name).double()
        return self


def commit_batch_norm(model: nn.Module, across_ranks: bool = False, discard: bool = False) -> None:
    """Ends a mini-batch: every :class:`DeferredBatchNorm` in ``model`` updates its running statistics by what it has seen since
    the last time. One that has seen nothing stays as it is.

    Args:
        model: in it, between the last backward pass of a mini-batch and the first forward pass of the next.
        across_ranks: pool over what the modules of all ranks have seen. Collective, one allgather for all modules
            together; a rank that has seen nothing takes part.
        discard: what this rank's modules have seen counts nothing, such as a sample that only fills up a batch.
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
    """Combines the statistics of all ranks; the same bits on every rank."""
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
    """What differs before and after a pass that has updated a buffer of a normalization module past its version counter.

    Kernels of batch norm update running statistics without a word to the counters of these, but ``num_batches_tracked`` tells. An
    instance norm never counts, and a subclass with a forward of its own may not: those are taken to have run if they train.

    Returns:
        None for other modules and buffers.
    """
    if name not in STATISTICS or not isinstance(module, NormBase) or isinstance(module, DeferredBatchNorm):
        return None
    if _counts_batches(module):
        counter = module._buffers["num_batches_tracked"]
        return id(counter), -1 if counter is None else counter._version
    return object() if module.training else None


def _counts_batches(module: NormBase) -> bool:
    """Whether ``num_batches_tracked`` tells that the module ran. An instance norm never counts, and a
    subclass with a forward of its own may not: such modules are taken to have run."""
    counter = module._buffers.get("num_batches_tracked")
    if counter is None or counter.is_inference() or not isinstance(module, AnyBatchNorm):
        return False
    return type(module).forward.__module__.startswith(_COUNTING_FORWARDS)
