"""Tests of micro-batches: they give the gradients of the whole mini-batch, and recompute or keep as requested."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same import assert_same, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_ckpt as hc
from hvd_ckpt.data.objectives import Batch
from hvd_ckpt.planning.policy import CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.tape import Policy


class Counted(nn.Module):
    """Two layers and a count of how often they run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layers(x)


def make(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(blocks)), nn.Linear(6, 5)).double()


def tokens(samples: int = 7, length: int = 4) -> Batch:
    """Targets with rows that have 0 to 4 terms; -100 is none."""
    torch.manual_seed(1)
    targets = torch.randint(5, (samples, length))
    for row in range(samples):
        targets[row, row % (length + 1) :] = -100
    return Batch((torch.randn(samples, length, 6, dtype=torch.float64),), targets)


def mean_loss(model: nn.Module, part: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(*part.inputs).flatten(0, 1), part.targets.flatten())


def terms(part: Batch) -> Tensor:
    return (part.targets != -100).sum()


def assert_close(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 3, 100])
def test_equals_the_whole_batch_weighted_by_tokens(parts: int) -> None:
    whole, model = make(), make()
    expected = mean_loss(whole, tokens())
    expected.backward()
    loss, weight = hc.accumulate(functools.partial(mean_loss, model), tokens(), parts, weight=terms)
    assert not loss.requires_grad and weight == float(terms(tokens()))
    assert_close([loss, *gradients(model)], [expected.detach(), *gradients(whole)])
    # With as many parts as samples, row 0 has no terms: its mean is nan, and must not count.
    assert model[0].runs == min(parts, 7)


def test_losses_in_half_precision_are_added_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    parts: list[Tensor] = []

    def compute(part: Tensor) -> Tensor:
        parts.append(part)
        return (weight * part).mean()

    loss, _ = hc.accumulate(compute, torch.ones(300, 1).bfloat16(), 400)
    assert len(parts) == 300 and all(len(part) == 1 for part in parts)  # at most as many as samples
    assert loss.dtype is torch.float32 and abs(float(loss) - 1) < 1e-4


class Overflowing(torch.autograd.Function):
    """The same values; the gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf"))


def test_an_overflow_is_seen_where_no_term_counts() -> None:
    weight = nn.Parameter(torch.ones(2))
    hc.accumulate(lambda part: Overflowing.apply(weight).sum(), torch.ones(2, 1), 1, weight=lambda part: 0)
    assert weight.grad is not None and weight.grad.isinf().all()


def test_any_tensors_weighted_by_samples() -> None:
    data: Any = {"inputs": (torch.randn(5, 6, dtype=torch.float64), None), "scale": 2.0}

    def compute(model: nn.Module, part: Any) -> Tensor:
        return (model(part["inputs"][0]) * part["scale"]).square().mean()

    whole, model = make(), make()
    expected = compute(whole, data)
    expected.backward()
    seen: list[bool] = []

    def backward(loss: Tensor, last: bool) -> None:
        seen.append(last)
        loss.backward()

    loss, weight = hc.accumulate(functools.partial(compute, model), data, 3, backward=backward)
    assert weight == 5 and seen == [False, False, True]
    assert_close([loss, *gradients(model)], [expected.detach(), *gradients(whole)])


def test_nothing_to_learn_from_gives_zeros() -> None:
    batch = tokens()
    batch = Batch(batch.inputs, torch.full_like(batch.targets, -100))

    def compute(model: nn.Module, part: Batch) -> Tensor:
        chain = hc.CheckpointSequential(model, 2)
        valid = part.targets != -100
        return (chain(*part.inputs).square().sum(-1) * valid).sum() / valid.sum()

    model = make()
    loss, weight = hc.accumulate(functools.partial(compute, model), batch, 2, weight=terms)
    assert loss == 0 and weight == 0
    assert_same(gradients(model), [torch.zeros_like(parameter) for parameter in model.parameters()])


@pytest.mark.parametrize("checkpoint, runs", [("always", 8), ("except_last", 7), ("never", 4)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_which_micro_batches_recompute(checkpoint: str, runs: int, use_reentrant: bool) -> None:
    whole, plain = make(), make()
    model = hc.CheckpointSequential(plain, 2, use_reentrant, keep_last=False)
    expected = mean_loss(whole, tokens())
    expected.backward()
    loss, _ = hc.accumulate(
        functools.partial(mean_loss, model), tokens(), 4, checkpoint=checkpoint, weight=terms
    )
    assert plain[0].runs == runs
    assert_close([loss, *gradients(model)], [expected.detach(), *gradients(whole)])


def test_errors() -> None:
    compute = functools.partial(mean_loss, make())
    for wrong, error, message in [
        ({"micro_batches": 0}, ValueError, "at least 1, got 0"),
        ({"micro_batches": 2.0}, TypeError, "must be an int, got 2.0"),
        ({"checkpoint": "sometimes"}, ValueError, "one of always, except_last, never, got 'sometimes'"),
        ({"weight": lambda part: -1}, ValueError, "0 or more, got -1.0"),
        ({"weight": lambda part: float("nan")}, ValueError, "0 or more, got nan"),
        ({"batch": {"a": torch.ones(3), "b": torch.ones(2, 1)}}, ValueError, r"the shapes \(3,\), \(2, 1\)"),
        ({"batch": [1, 2]}, TypeError, r"no tensors and no split\(parts\).*int"),
        ({"compute": lambda part: part.inputs[0]}, TypeError, r"one element, got one of shape \(4, 4, 6\)"),
        ({"compute": lambda part: 1.0}, TypeError, "one element, got a float"),
    ]:
        arguments = {"compute": compute, "batch": tokens(), "micro_batches": 2, **wrong}
        with pytest.raises(error, match=message):
            hc.accumulate(**arguments)


POLICY = Policy(("linear", "gelu", "linear"), frozenset({1}))

WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "non-reentrant": lambda block, x: hc.checkpoint(block, x),
    "reentrant": lambda block, x: hc.checkpoint(block, x, use_reentrant=True),
    "CheckpointFunction": lambda block, x: hc.CheckpointFunction.apply(block, 1, x, *block.parameters()),
    "checkpoint_sequential": lambda block, x: hc.checkpoint_sequential([block], 1, x, keep_last=False),
    "nested": lambda block, x: hc.checkpoint(lambda y: hc.checkpoint(block, y).sin(), x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward_inside", [True, False])
def test_without_recomputation_a_call_just_runs(way: str, backward_inside: bool) -> None:
    def run(keep: bool) -> tuple[int, list[Tensor | None]]:
        block = make()[0]
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
        if keep:
            with hc.without_recomputation():
                y = WAYS[way](block, x)
                assert not hc.is_checkpointing()
                if backward_inside:
                    y.sum().backward()
        else:
            y = WAYS[way](block, x)
        if not (keep and backward_inside):
            y.sum().backward()
        assert x.grad is not None
        return block.runs, [y.detach(), x.grad, *gradients(block)]

    (recomputed_runs, recomputed), (kept_runs, kept) = run(False), run(True)
    assert recomputed_runs > 1 and kept_runs == 1
    assert_same(recomputed, kept)


def test_a_backward_pass_inside_recomputes_as_the_forward_pass_did() -> None:
    """The inner region of a region that was recorded outside is a region in the recomputation, too."""

    def run(inside: bool) -> tuple[int, list[Tensor | None]]:
        block = make()[0]
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
        y = hc.checkpoint(lambda x: torch.as_tensor(hc.checkpoint(block, x.sin())).tanh().sin(), x)
        with hc.without_recomputation() if inside else contextlib.nullcontext():
            y.sum().backward()
        assert x.grad is not None
        return block.runs, [y.detach(), x.grad, *gradients(block)]

    (runs, expected), (inside_runs, inside) = run(False), run(True)
    assert runs == inside_runs == 3
    assert_same(expected, inside)


@pytest.mark.parametrize(
    "policy", [CheckpointPolicy("recompute", recompute=True), CheckpointPolicy("drop", POLICY)]
)
def test_blocks_with_a_policy_keep_what_they_would_drop(policy: CheckpointPolicy) -> None:
    def run(keep: bool) -> tuple[int, list[Tensor | None]]:
        """The runs of the activation function, and results."""
        block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double()
        block.load_state_dict(state)
        apply_policy(block, policy)
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
        calls: list[int] = []
        with CountGelu(calls), hc.without_recomputation() if keep else contextlib.nullcontext():
            y = block(x)
            y.sum().backward()
        assert x.grad is not None
        return len(calls), [y.detach(), x.grad, *gradients(block)]

    state = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double().state_dict()
    (dropped_runs, dropped), (kept_runs, kept) = run(False), run(True)
    assert (dropped_runs, kept_runs) == (2, 1)
    assert_same(dropped, kept)


class CountGelu(TorchDispatchMode):
    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += [1] * (function is torch.ops.aten.gelu.default)
        return function(*args, **(kwargs or {}))
