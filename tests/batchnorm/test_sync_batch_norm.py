"""SyncBatchNorm over ranks is batch norm over the batches of all ranks, and recomputation does not communicate.

Run on every rank: ``horovodrun -np 2 python -m pytest tests/batchnorm/test_sync_batch_norm.py``.
"""

import functools
from collections import Counter

import horovod.torch as hvd
import pytest
import torch
from same import assert_same, gradients
from torch import nn
from ways import VARIANTS, by_function, plainly, reentrant

from hvd_ckpt.batchnorm import SyncBatchNorm
from hvd_ckpt.recompute import checkpoint, is_recomputing

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def collectives(monkeypatch):
    """Counts the blocking collectives that this rank starts, and all of them within recomputations."""
    counts = Counter()

    def counted(name, original):
        @functools.wraps(original)
        def call(*args, **kwargs):
            # Blocking calls start asynchronous ones, which are not counted again.
            counts[name] += not name.endswith("async")
            counts["recomputing"] += is_recomputing()
            return original(*args, **kwargs)

        return call

    for module in (hvd, hvd.mpi_ops):
        for name in ("allgather", "allreduce", "allgather_async", "allreduce_async"):
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def close(one, other, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(
    ("kind", "shape", "options", "uneven", "dtype"),
    [
        (nn.BatchNorm1d, (3, 4), {}, True, torch.float64),
        (nn.BatchNorm1d, (2, 4, 5), {"momentum": None}, False, torch.float32),
        (nn.BatchNorm2d, (2, 4, 3, 3), {"momentum": 0.3, "eps": 1e-3}, True, torch.bfloat16),
        (nn.BatchNorm3d, (2, 4, 2, 3, 2), {"affine": False}, True, torch.float64),
        (nn.BatchNorm2d, (2, 4, 3, 3), {"track_running_stats": False}, True, torch.float16),
    ],
)
def test_equals_one_process(kind, shape, options, uneven, dtype):
    """Which has the batches of all ranks, in float64."""
    generator = torch.Generator().manual_seed(11)
    sizes = [shape[0] + 2 * rank * uneven for rank in range(hvd.size())]
    every_input, every_gradient = (
        [torch.randn(rows, *shape[1:], generator=generator).to(dtype) for rows in sizes] for _ in range(2)
    )
    every_input = [(x * (rank + 1) + 3 * rank).to(dtype) for rank, x in enumerate(every_input)]
    layout = torch.channels_last if dtype == torch.bfloat16 else torch.contiguous_format
    reference, norm = kind(4, **options).double(), SyncBatchNorm(4, **options)
    norm.to(torch.float64 if dtype == torch.float64 else torch.float32)
    for parameters in zip(reference.parameters(), norm.parameters()):
        for parameter in parameters:
            parameter.data.copy_(torch.linspace(-0.5, 2, 4))
    x = every_input[hvd.rank()].clone(memory_format=layout).requires_grad_()
    whole = torch.cat(every_input).double().requires_grad_()
    for _ in range(2):
        y, expected = norm(x), reference(whole)
        y.backward(every_gradient[hvd.rank()])
        expected.backward(torch.cat(every_gradient).double())
    assert y.dtype == x.grad.dtype == dtype and y.is_contiguous(memory_format=layout)
    close(y, expected.split(sizes)[hvd.rank()], dtype)
    close(x.grad, whole.grad.split(sizes)[hvd.rank()], dtype)
    for mine, wanted in zip(gradients(norm), gradients(reference)):
        close(hvd.allreduce(mine.double(), op=hvd.Sum, name="gradient"), wanted, dtype)
    for (name, buffer), wanted in zip(norm.named_buffers(), reference.buffers()):
        close(buffer, wanted, dtype)
        gathered = hvd.allgather(buffer.reshape(1, -1), name=f"buffer.{name}")
        assert all(torch.equal(row, gathered[0]) for row in gathered)  # bit for bit the same everywhere
    # Evaluation mode uses the statistics, or, without them, the batches of all ranks.
    close(norm.eval()(x), reference.eval()(whole).split(sizes)[hvd.rank()], dtype)


def test_a_rank_with_an_empty_batch_and_a_single_value_over_all_ranks():
    norm, reference = SyncBatchNorm(4), nn.BatchNorm1d(4)
    full = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    x = (full if hvd.rank() == 0 else full[:0]).clone().requires_grad_()
    norm(x).square().sum().backward()
    reference(full)
    close(norm.running_var, reference.running_var, torch.float32)
    assert x.grad is not None and x.grad.shape == x.shape
    with pytest.raises(ValueError, match="more than one value per channel over all ranks"):
        norm(x[:1])


def test_what_needs_no_communication(collectives):
    """A frozen input sends nothing backward, evaluation mode nothing at all, and others may have no such norm."""
    norm = SyncBatchNorm(4)
    norm(torch.randn(3, 4)).square().sum().backward()
    assert collectives["allreduce"] == sum(collectives.values()) == 1
    assert norm.weight.grad is not None
    norm.eval()(torch.randn(3 + hvd.rank(), 4, requires_grad=True)).sum().backward()
    assert sum(collectives.values()) == 1
    if hvd.rank() == 0:
        SyncBatchNorm(4)
    SyncBatchNorm(4)(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_gradients_of_gradients_are_refused():
    x = torch.randn(3, 4, requires_grad=True)
    y = SyncBatchNorm(4)(x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class HorovodOnCPU(hvd.SyncBatchNorm):
    """Horovod's own, whose forward refuses CPU tensors before it comes to the part that this library replaces."""

    def forward(self, input):
        self._check_input_dim(input)
        if self.training and self.track_running_stats:
            self.num_batches_tracked = self.num_batches_tracked + 1
        if not self.training and self.track_running_stats:
            return self._run_bn(input)
        return self._maybe_run_sync_bn(input)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm, self.other = norm(4), norm(4, momentum=None)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.other(self.second(self.norm(x.sin()))).tanh()


def train(norm, call, collectives, autocast=False):
    """Gradients and statistics after two steps, in which recomputation communicates nothing."""
    torch.manual_seed(0)
    block = Block(norm)
    torch.manual_seed(1 + hvd.rank())
    collectives.clear()
    for _ in range(2):
        x = torch.randn(2 + hvd.rank(), 4, 3, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = call(block, x)
        y.float().square().sum().backward(retain_graph=True)
        y.float().sum().backward()
    # Three normalizations in each step, forward and in two backward passes.
    assert collectives["allreduce"] == sum(collectives.values()) == 2 * 3 * (1 + 2)
    assert all("_maybe_run_sync_bn" not in vars(module) for module in block.modules())
    return [x.grad, *gradients(block)], list(block.buffers())


def nested(outer, inner):
    def within(block, x):
        return inner(block, x.exp().log()).exp().log()

    return lambda block, x: outer(within, block, x)


@pytest.mark.parametrize(
    ("call", "autocast"),
    [
        (checkpoint, False),
        (checkpoint, True),
        (reentrant, True),
        (by_function, False),
        (nested(checkpoint, reentrant), False),
        (nested(reentrant, checkpoint), False),
    ],
    ids=[
        "non-reentrant",
        "non-reentrant-bfloat16",
        "reentrant-bfloat16",
        "CheckpointFunction",
        "inner",
        "outer",
    ],
)
def test_recomputation_is_silent_and_exact(call, autocast, collectives):
    # One norm is used twice: all but the non-reentrant variant add up its gradients in another order.
    expected = train(SyncBatchNorm, plainly, collectives, autocast)
    found = train(SyncBatchNorm, call, collectives, autocast)
    assert_same(found[0], expected[0], 0.0 if call is checkpoint else 1e-4)
    assert_same(found[1], expected[1], 0.0 if call in (checkpoint, reentrant, by_function) else 1e-4)


@VARIANTS
def test_horovods_own_is_silent_too(run, collectives):
    expected = train(SyncBatchNorm, plainly, collectives)
    torch.testing.assert_close(train(HorovodOnCPU, run, collectives), expected)
