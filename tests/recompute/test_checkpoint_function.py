"""CheckpointFunction: a recomputation whose parameters are inputs of one autograd node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from same import assert_same
from torch import nn

from hvd_ckpt.recompute import CheckpointFunction, checkpoint


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.3), nn.Linear(6, 4), nn.Tanh())


def outcome(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in (*module.parameters(), *inputs)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_equals_a_plain_call(autocast: bool, needs_grad: bool) -> None:
    def run(recompute: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        module = model()
        x = torch.randn(3, 4, requires_grad=needs_grad)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = CheckpointFunction.apply(module, 1, x, *module.parameters()) if recompute else module(x)
        y.float().square().sum().backward()
        return outcome(module, x), torch.get_rng_state()

    (plain, plain_state), (recomputed, state) = run(False), run(True)
    assert_same(plain, recomputed)
    assert torch.equal(plain_state, state)


def test_each_parameter_is_accumulated_once_however_many_regions_use_it() -> None:
    module, fires = nn.Linear(4, 4), []
    module.weight.register_post_accumulate_grad_hook(lambda _: fires.append(1))
    x = torch.randn(2, 4)
    for _ in range(3):
        x = CheckpointFunction.apply(lambda x: module(x).sin(), 1, x, *module.parameters())
    x.sum().backward()
    assert len(fires) == 1
    x = torch.randn(2, 4)
    for _ in range(3):
        x = checkpoint(module, x, use_reentrant=True)
    x.sum().backward()
    assert len(fires) == 4  # PyTorch's reentrant variant, in contrast


def test_tensor_hooks_run_once() -> None:
    module, x, calls = nn.Linear(4, 4), torch.randn(2, 4), []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * 2

    module.weight.register_hook(double)
    module(x).sum().backward()
    expected = outcome(module)
    module.zero_grad()
    CheckpointFunction.apply(module, 1, x, *module.parameters()).sum().backward()
    assert_same(expected, outcome(module))
    assert len(calls) == 2


def test_several_outputs_and_non_tensors() -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        module = model().eval()
        x, other = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)

        def function(x: torch.Tensor, power: int, other: torch.Tensor, name: str) -> tuple[Any, ...]:
            assert name == "name"
            y = module(x) * other
            return y**power, x.cos(), y.argmax(), y.detach()

        args = (x, 3, other, "name")
        first, second, index, _ = (
            CheckpointFunction.apply(function, 4, *args, *module.parameters())
            if recompute
            else function(*args)
        )
        assert not index.requires_grad
        (first.sum() + second.sum()).backward()
        return outcome(module, x)

    assert_same(run(False), run(True))


def test_unused_outputs_and_unused_parameters_have_no_gradient() -> None:
    used, behind, unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.randn(1, 2, requires_grad=True)
    parameters = [*used.parameters(), *behind.parameters(), *unused.parameters()]
    first, _ = CheckpointFunction.apply(lambda x: (used(x), behind(x)), 1, x, *parameters)
    first.sum().backward()
    assert used.weight.grad is not None and x.grad is not None
    assert behind.weight.grad is None and unused.weight.grad is None


def test_outputs_that_need_no_gradients_are_an_error() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    y = CheckpointFunction.apply(lambda x: layer(x).detach(), 1, x, *layer.parameters())
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        y.sum().backward()


def test_an_output_that_needs_no_gradient_beside_one_that_does() -> None:
    x = torch.randn(2, requires_grad=True)
    constant, _ = CheckpointFunction.apply(lambda x: (x.detach().sin(), x.cos()), 1, x)
    constant.sum().backward()
    assert x.grad is None


def test_two_backward_passes_and_grad() -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        module = model()
        x = torch.randn(3, 4, requires_grad=True)
        y = CheckpointFunction.apply(module, 1, x, *module.parameters()) if recompute else module(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), x)
        return [*outcome(module, x), slope]

    assert_same(run(False), run(True))


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(2, requires_grad=True)
    y = CheckpointFunction.apply(torch.sin, 1, x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_frozen_parameters_and_frozen_function() -> None:
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    both = nn.Sequential(frozen, trained)
    CheckpointFunction.apply(both, 1, torch.randn(1, 2), *both.parameters()).sum().backward()
    assert frozen.weight.grad is None and trained.weight.grad is not None
    y = CheckpointFunction.apply(frozen, 1, torch.randn(1, 2), *frozen.parameters())
    assert not y.requires_grad


def test_a_parameter_that_is_computed() -> None:
    def run(recompute: bool) -> torch.Tensor | None:
        raw = torch.linspace(0, 1, 4, requires_grad=True)
        weight = raw.exp() * 2
        x = torch.ones(4)

        def function(x: torch.Tensor) -> torch.Tensor:
            return (x * weight).sin()

        (CheckpointFunction.apply(function, 1, x, weight) if recompute else function(x)).sum().backward()
        return raw.grad

    assert_same([run(False)], [run(True)])


@pytest.mark.parametrize("outer", ["function", False, True])
def test_inside_another_region(outer: Any) -> None:
    def run(recompute: bool) -> list[torch.Tensor | None]:
        module = model()
        parameters = list(module.parameters())
        x = torch.randn(3, 4, requires_grad=True)

        def outside(x: torch.Tensor) -> torch.Tensor:
            y = CheckpointFunction.apply(module, 1, x.sin(), *parameters) if recompute else module(x.sin())
            return y.cos().sin()

        if not recompute:
            y = outside(x)
        elif outer == "function":
            y = CheckpointFunction.apply(outside, 1, x, *parameters)
        else:
            y = checkpoint(outside, x, use_reentrant=outer)
        y.sum().backward()
        return outcome(module, x)

    assert_same(run(False), run(True))


def test_a_parameter_that_is_not_listed_is_an_error() -> None:
    module = nn.Linear(4, 3)
    y = CheckpointFunction.apply(module, 1, torch.randn(2, 4), module.weight)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(3,\) that is not among its arguments"):
        y.sum().backward()


def test_an_input_changed_in_place_is_an_error() -> None:
    x, weight = torch.randn(2), torch.randn(2, requires_grad=True)
    y = CheckpointFunction.apply(lambda x: x * weight, 1, x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((3, 1, torch.ones(1)), TypeError, "something to call, got int"),
        ((torch.sin, 1.0, torch.ones(1)), TypeError, "must be an int, got 1.0"),
        ((torch.sin, 2, torch.ones(1)), ValueError, "between 0 and the 1 arguments given, got 2"),
        ((torch.sin, 1, torch.ones(1), "w"), TypeError, "must be tensors, got str at position 1"),
    ],
)
def test_errors(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CheckpointFunction.apply(*args)
