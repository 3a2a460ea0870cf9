"""SyncBatchNorm over ranks is batch norm over the batches of all ranks, and recomputation does not communicate.

Run on every rank: ``horovodrun -np 2 python -m pytest tests/batchnorm/test_sync_batch_norm.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn
from ways import VARIANTS, Run, by_function, plainly, reentrant

from hvd_ckpt.batchnorm import SyncBatchNorm
from hvd_ckpt.recompute import checkpoint, is_recomputing

pytestmark = pytest.mark.ranks(gloo=(2,), mpi=(4,))


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the collective operations that this rank starts, and how many of them in a recomputation."""
    counts: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            counts["recomputing"] += is_recomputing()
            return original(*args, **kwargs)

        return call

    for module in (hvd, hvd.mpi_ops):
        for name in ("allgather", "allreduce", "allgather_async", "allreduce_async"):
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def total(counts: Counter[str]) -> dict[str, int]:
    """The blocking calls start the asynchronous ones; both are wrapped, so only the outer ones are counted here."""
    return {name: counts[name] for name in ("allgather", "allreduce")}


def everyone(shape: tuple[int, ...], uneven: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The batches and the incoming gradients of all ranks, the same on each rank."""
    generator = torch.Generator().manual_seed(11)
    inputs, gradients = [], []
    for rank in range(hvd.size()):
        rows = shape[0] + (2 * rank if uneven else 0)
        inputs.append((torch.randn(rows, *shape[1:], generator=generator) * (rank + 1) + 3 * rank).to(dtype))
        gradients.append(torch.randn(rows, *shape[1:], generator=generator).to(dtype))
    return inputs, gradients


def plain_reference(norm: nn.Module, inputs: list[Tensor], gradients: list[Tensor], steps: int) -> Any:
    """One process with the batches of all ranks, in float64."""
    norm = norm.double()
    x = torch.cat(inputs).double().requires_grad_()
    for _ in range(steps):
        y = norm(x)
        y.backward(torch.cat(gradients).double())
    return y, x.grad, norm


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(
    ("shape", "options", "uneven", "dtype"),
    [
        ((3, 4), {}, True, torch.float64),
        ((2, 4, 5), {"momentum": None}, False, torch.float32),
        ((2, 4, 3, 3), {"momentum": 0.3, "eps": 1e-3}, True, torch.bfloat16),
        ((2, 4, 2, 3, 2), {"affine": False}, True, torch.float64),
        ((2, 4, 3, 3), {"track_running_stats": False}, True, torch.float16),
    ],
)
def test_equals_one_process(
    shape: tuple[int, ...], options: dict[str, Any], uneven: bool, dtype: torch.dtype
) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    inputs, gradients = everyone(shape, uneven, dtype)
    reference, norm = kind(4, **options), SyncBatchNorm(4, **options)
    if dtype == torch.float64:
        norm.double()
    for module in (reference, norm):
        if module.affine:
            with torch.no_grad():
                module.weight.copy_(torch.linspace(0.5, 2, 4))
                module.bias.copy_(torch.linspace(-1, 1, 4))
    steps = 2
    expected, expected_gradient, reference = plain_reference(reference, inputs, gradients, steps)
    x = inputs[hvd.rank()].clone().requires_grad_()
    for _ in range(steps):
        y = norm(x)
        y.backward(gradients[hvd.rank()])
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    sizes = [len(one) for one in inputs]
    close(y, expected.split(sizes)[hvd.rank()], dtype)
    close(x.grad, expected_gradient.split(sizes)[hvd.rank()], dtype)
    for parameter, wanted in zip(norm.parameters(), reference.parameters()):
        mine = hvd.allreduce(parameter.grad.double(), op=hvd.Sum, name="gradient")
        close(mine, wanted.grad, dtype)
    for (name, buffer), wanted in zip(norm.named_buffers(), reference.buffers()):
        close(buffer, wanted, dtype)
        gathered = hvd.allgather(buffer.reshape(1, -1), name=f"buffer.{name}")
        assert all(torch.equal(row, gathered[0]) for row in gathered)  # bit for bit the same everywhere
    # Evaluation mode uses the statistics, or, without them, the batches of all ranks.
    norm.eval()
    reference.eval()
    close(norm(x), reference(torch.cat(inputs).double()).split(sizes)[hvd.rank()], dtype)


def test_channels_last_keeps_its_layout() -> None:
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    y = SyncBatchNorm(4)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.square().sum().backward()


def test_a_rank_with_an_empty_batch() -> None:
    norm, reference = SyncBatchNorm(4), nn.BatchNorm1d(4)
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(5, 4, generator=generator)
    x = (full if hvd.rank() == 0 else full[:0]).clone().requires_grad_()
    norm(x).square().sum().backward()
    reference(full)
    close(norm.running_var, reference.running_var, torch.float32)
    assert x.grad is not None and x.grad.shape == x.shape


def test_a_single_value_over_all_ranks_is_an_error() -> None:
    norm = SyncBatchNorm(4)
    x = torch.randn(1 if hvd.rank() == 0 else 0, 4)
    with pytest.raises(ValueError, match="more than one value per channel over all ranks"):
        norm(x)


def test_frozen_input_sends_nothing_backward(collectives: Counter[str]) -> None:
    norm = SyncBatchNorm(4)
    norm(torch.randn(3, 4)).square().sum().backward()
    assert total(collectives) == {"allgather": 0, "allreduce": 1}
    assert norm.weight.grad is not None


def test_evaluation_mode_does_not_communicate(collectives: Counter[str]) -> None:
    SyncBatchNorm(4).eval()(torch.randn(3 + hvd.rank(), 4, requires_grad=True)).sum().backward()
    assert sum(collectives.values()) == 0


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = SyncBatchNorm(4)(x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class HorovodOnCPU(hvd.SyncBatchNorm):
    """Horovod's own, whose forward refuses CPU tensors before it comes to the part that this library replaces."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training and self.track_running_stats:
            self.num_batches_tracked = self.num_batches_tracked + 1
        if not self.training and self.track_running_stats:
            return self._run_bn(input)
        return self._maybe_run_sync_bn(input)


class Block(nn.Module):
    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)
        self.norm = norm(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.other = norm(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.other(self.second(self.norm(x.sin()))).tanh()


def train(norm: Callable[..., nn.Module], call: Run, autocast: bool) -> Any:
    torch.manual_seed(0)
    block = Block(norm)
    torch.manual_seed(1 + hvd.rank())
    for _ in range(2):
        x = torch.randn(2 + hvd.rank(), 4, 3, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = call(block, x)
        y.float().square().sum().backward(retain_graph=True)
        y.float().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


CALLS = 2 * 3  # two steps, three normalizations in each


def nested(outer: bool, inner: bool) -> Run:
    def call(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda x: checkpoint(block, x.sin().asin(), use_reentrant=inner).sin().asin(),
            x,
            use_reentrant=outer,
        )
        return out

    return call


@contextlib.contextmanager
def no_communication_in_recomputation(counts: Counter[str]) -> Iterator[None]:
    counts.clear()
    yield
    assert counts["recomputing"] == 0
    # Forward once per normalization; two backward passes through each.
    assert total(counts) == {"allgather": 0, "allreduce": 3 * CALLS}


@pytest.mark.parametrize(
    ("call", "autocast"),
    [(checkpoint, False), (checkpoint, True), (reentrant, True), (by_function, False)],
    ids=["non-reentrant", "non-reentrant-bfloat16", "reentrant-bfloat16", "CheckpointFunction"],
)
def test_recomputation_is_silent_and_exact(call: Run, autocast: bool, collectives: Counter[str]) -> None:
    with no_communication_in_recomputation(collectives):
        expected = train(SyncBatchNorm, plainly, autocast)
    with no_communication_in_recomputation(collectives):
        found = train(SyncBatchNorm, call, autocast)
    # One norm is used twice: the reentrant variant adds up its gradients in another order.
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    exact = 0 if call is checkpoint else -len(list(Block(SyncBatchNorm).buffers()))
    assert all(torch.equal(one, other) for one, other in zip(expected[exact:], found[exact:]))


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False)])
def test_nested_recomputation_is_silent(outer: bool, inner: bool, collectives: Counter[str]) -> None:
    with no_communication_in_recomputation(collectives):
        found = train(SyncBatchNorm, nested(outer, inner), False)
    assert all(value is not None for value in found)


@VARIANTS
def test_horovods_own_is_silent_too(run: Run, collectives: Counter[str]) -> None:
    expected = train(SyncBatchNorm, plainly, False)
    blocks = []

    def call(block: nn.Module, x: Tensor) -> Tensor:
        blocks.append(block)
        return run(block, x)

    with no_communication_in_recomputation(collectives):
        found = train(HorovodOnCPU, call, False)
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other)
    for block in blocks:
        assert all("_maybe_run_sync_bn" not in vars(module) for module in block.modules())


def test_model_on_one_rank_only_does_not_affect_other_ranks() -> None:
    if hvd.rank() == 0:
        SyncBatchNorm(4)
    norm = SyncBatchNorm(4)
    norm(torch.randn(2, 4, requires_grad=True)).sum().backward()
