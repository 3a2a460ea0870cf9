"""Batch norm over the batches of all ranks, on CPU and GPU, with one communication per batch and direction.

The first pass gathers the mean, the sum of squared deviations and the count of each rank in one allreduce. It combines them by the
formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979), so ranks may
have batches of different sizes. The backward pass sums two vectors in one allreduce. A recomputation does not communicate: it reads
the statistics of the first pass from its frame.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ckpt.utils.frames import remembered
from hvd_ckpt.utils.measure import is_undisturbed
from hvd_ckpt.utils.torch_private import AnyBatchNorm, LazyNormBase

_RUN = "_maybe_run_sync_bn"  # the method of Horovod's SyncBatchNorm that communicates


class ForAnyShape(AnyBatchNorm):
    """Base class of batch norms for inputs of shape (N, C, ...)."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"{type(self).__name__} was made for {self.num_features} channels and inputs of shape (batch, channels, ...), got "
                f"{tuple(input.shape)}."
            )


def check_shape(name: str, module: nn.Module) -> None:
    """Raises ValueError for a lazy module that is not initialized."""
    if isinstance(module, LazyNormBase):
        raise ValueError(
            f"The {type(module).__name__} '{name}' has no shape yet: run the model once before converting it."
        )


class SyncBatchNorm(ForAnyShape):
    """Batch norm of an input of shape (N, C, ...) by the mean and variance over the batches of all ranks.

    It takes the arguments of ``horovod.torch.SyncBatchNorm`` and also runs on CPU. In training mode, every rank must run the module
    the same number of times. In evaluation mode and on one rank, it is a plain batch norm. Half-precision inputs are accumulated in
    float32. The running variance is updated by the unbiased variance over all ranks.

    Args:
        num_features: number of channels C.
        eps: value added to the variance for numerical stability.
        momentum: weight of the newest batch in the running statistics; None averages over all batches.
        affine: whether to learn a scale and a shift per channel.
        track_running_stats: whether to keep running statistics. Without them, evaluation mode also normalizes by the batches of all
            ranks.
        device, dtype: device and dtype of parameters and statistics.

    Raises:
        ValueError: an input has fewer than 2 dimensions, another number of channels, or a single value per channel over all ranks.
    """

    @classmethod
    def convert(cls, model: nn.Module) -> nn.Module:
        """Converts each batch norm in ``model``, or the model itself, to a synchronized batch norm.

        These are ``BatchNorm1d``, ``2d`` and ``3d``, and the synchronized batch norms of PyTorch, Horovod and Apex. (Without
        ``torch.distributed``, PyTorch's is a plain batch norm, without a warning.) The modules remain the same objects with their
        parameters, buffers, options, hooks and modes.

        Returns:
            ``model``.

        Raises:
            ValueError: a batch norm is lazy and not initialized, or its class has its own ``forward``, which would be lost.
        """
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        for name, module in model.named_modules():
            if not isinstance(module, AnyBatchNorm) or isinstance(module, ForAnyShape):
                continue
            kind = type(module)
            check_shape(name, module)
            if isinstance(module, plain) and kind.forward is not AnyBatchNorm.forward:
                raise ValueError(
                    f"The {kind.__name__} '{name}' has a forward() of its own, which SyncBatchNorm.convert() would take away: put "
                    f"what it adds into a module of its own beside a torch.nn.BatchNorm."
                )
            module.__class__ = cls
        return model

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None) or not _communicates():
            return super().forward(input)
        self._check_input_dim(input)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return synchronized_batch_norm(self, input)


def _communicates() -> bool:
    return not is_undisturbed() and bool(hvd.size() > 1)


class Statistics(NamedTuple):
    """Statistics of the inputs of all ranks: mean and biased variance of each channel, and the number of values in each."""

    mean: Tensor
    variance: Tensor
    number: Tensor


def synchronized_batch_norm(module: AnyBatchNorm, input: Tensor) -> Tensor:
    """Normalizes ``input`` (N, C, ...) by the batches of all ranks and updates the running statistics of ``module``."""
    accumulate = torch.float64 if input.dtype == torch.float64 else torch.float32
    statistics = remembered(lambda: _global_statistics(input.detach(), accumulate))
    if module.training and module.track_running_stats and module.running_mean is not None:
        _update_running_statistics(module, statistics)
    rounded = Statistics(
        statistics.mean.to(accumulate), statistics.variance.to(accumulate), statistics.number
    )
    output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        input, module.weight, module.bias, rounded, module.eps
    )
    return output


def _global_statistics(input: Tensor, accumulate: torch.dtype) -> Statistics:
    """The statistics over all ranks, in float64."""
    with torch.no_grad():
        channels = input.size(1)
        local_count = input.numel() // max(channels, 1)
        packed = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
        if local_count:
            variance, mean = torch.var_mean(input.to(accumulate), dim=_all_but_channels(input), correction=0)
            packed[:channels] = mean
            packed[channels:-1] = variance.double() * local_count
            packed[-1] = local_count
        # An allgather by an allreduce: a rank that has called join() adds a row of zeros, which counts nothing.
        rows = packed.new_zeros(hvd.size(), packed.numel())
        rows[hvd.rank()] = packed
        gathered: Tensor = hvd.allreduce(rows, op=hvd.Sum, name=_collective_name("forward", rows))
        means, deviations, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
        count = counts.sum()
        if local_count <= 1 and count.item() <= 1:
            raise ValueError(
                f"SyncBatchNorm needs more than one value per channel over all ranks to train, got an input of shape "
                f"{tuple(input.shape)}."
            )
        mean = (means * counts).sum(0) / count
        variance = (deviations + counts * (means - mean) ** 2).sum(0) / count
        return Statistics(mean, variance, count)


def _update_running_statistics(module: AnyBatchNorm, statistics: Statistics) -> None:
    assert module.running_mean is not None and module.running_var is not None
    mean, variance, count = statistics
    factor = average_factor(module)
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


def average_factor(module: AnyBatchNorm) -> float:
    """Weight of the newest batch in the running statistics."""
    if module.momentum is not None:
        return module.momentum
    if module.num_batches_tracked is None:
        return 0.0
    return 1.0 / float(module.num_batches_tracked)


def _collective_name(direction: str, tensor: Tensor) -> str:
    """A name for all tensors of the same size and dtype, so that Horovod's response cache can skip the negotiation.

    The name does not depend on the number of modules that a rank has built: ranks that differ in it (an extra model on rank 0)
    would wait for each other's names. Sharing a name is safe, since each operation is waited for at once.
    """
    return f"hvd_ckpt.sync_batch_norm.{direction}.{tensor.size(-1)}.{tensor.dtype}"


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


class _Normalize(torch.autograd.Function):
    """Normalization by statistics that depend on the inputs of all ranks, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
    ) -> Tensor:
        # A tuple is no input of the graph: no gradient flows to the statistics, whose share is in that of the input.
        mean, variance, count = statistics
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        # The built-in kernel for any layout, with the statistics of the batch in place of running statistics.
        return functional.batch_norm(input, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SyncBatchNorm gives no gradients of gradients over several ranks (create_graph=True): use BatchNorm."
            )
        input, weight, mean, inverse_deviation, count = ctx.saved_tensors
        need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
        # With the incoming gradient g, c = input - mean, d = 1 / sqrt(variance + eps), and sums over the n values of a channel on
        # all ranks:
        #
        #     gradient of the input = weight * d * (g - sum(g) / n - c * d^2 * sum(g * c) / n)
        #
        # The two sums are the message of the backward pass. Those of this rank alone also give its gradients of weight and bias.
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = _all_but_channels(input)
        gradient = grad_output.to(mean.dtype)
        centered = input.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([gradient.sum(dims), (gradient * centered).sum(dims)])
        # Gradients of parameters are those of this rank: the optimizer reduces them.
        grad_weight = (sums[1] * inverse_deviation).to(weight.dtype) if need_weight else None
        grad_bias = sums[0].clone() if need_bias else None
        grad_input = None
        if need_input:
            totals = hvd.allreduce(sums, op=hvd.Sum, name=_collective_name("backward", sums)) / count.to(
                mean.dtype
            )
            slope = totals[1] * inverse_deviation**2
            scale = inverse_deviation if weight is None else inverse_deviation * weight.to(mean.dtype)
            grad_input = gradient - totals[0].view(shape) - centered * slope.view(shape)
            grad_input = (grad_input * scale.view(shape)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None


@contextlib.contextmanager
def synchronized_once(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which instances of Horovod's own ``SyncBatchNorm`` normalize by the operations of this file.

    So they do not communicate again in a recomputation. Only these instances change, and only for that time.
    """
    with contextlib.ExitStack() as restore:
        for attributes in map(vars, modules):
            if _RUN in attributes:  # an outer region has replaced it already
                restore.callback(attributes.__setitem__, _RUN, attributes[_RUN])
            else:
                restore.callback(attributes.pop, _RUN)
        for module in modules:
            vars(module)[_RUN] = functools.partial(_run, module)
        yield


def _run(module: Any, input: Tensor) -> Tensor:
    output: Tensor = synchronized_batch_norm(module, input) if _communicates() else module._run_bn(input)
    return output
