"""CheckpointFunction: a recomputation whose parameters are inputs of one autograd node; see also test_checkpoint.py."""

from __future__ import annotations

import pytest
import torch
from same import assert_same
from torch import nn

from hvd_ckpt.recompute import CheckpointFunction, checkpoint


def test_each_parameter_is_accumulated_once_however_many_regions_use_it():
    module, accumulated = nn.Linear(4, 4), []
    module.weight.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))
    x = torch.randn(2, 4)
    for _ in range(3):
        x = CheckpointFunction.apply(lambda x: module(x).sin(), 1, x, *module.parameters())
    x.sum().backward()
    assert len(accumulated) == 1
    x = torch.randn(2, 4)
    for _ in range(3):
        x = checkpoint(module, x, use_reentrant=True)
    x.sum().backward()
    assert len(accumulated) == 4  # PyTorch's reentrant variant, in contrast


def test_a_tensor_that_is_given_twice_gets_its_gradient_once():
    first, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4, requires_grad=True)
    second = nn.Linear(4, 4, bias=False)
    second.weight, same = first.weight, []

    def function(left, right):
        same.append(left is right)
        return second(first(left).sin() * right)

    expected = torch.autograd.grad(function(x, x).sum(), [x, first.weight])
    parameters = [*first.parameters(), *second.parameters()]
    CheckpointFunction.apply(function, 2, x, x, *parameters).sum().backward()
    assert_same([x.grad, first.weight.grad], list(expected))
    assert same == [True] * 3


@pytest.mark.parametrize("leaf", [True, False])
def test_tensor_hooks_run_once(leaf):
    parameter, x, calls = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4), []

    def double(gradient):
        calls.append(1)
        return gradient * 2

    def gradient(run):
        weight = parameter if leaf else parameter * 1
        hook, parameter.grad = weight.register_hook(double), None
        run(lambda x: x @ weight, weight).sum().backward()
        hook.remove()
        return parameter.grad

    expected = gradient(lambda function, weight: function(x))
    assert_same(expected, gradient(lambda function, weight: CheckpointFunction.apply(function, 1, x, weight)))
    assert len(calls) == 2


def test_gradients_of_gradients_are_refused():
    x = torch.randn(2, requires_grad=True)
    y = CheckpointFunction.apply(torch.sin, 1, x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_parameter_that_is_not_listed_is_an_error():
    module = nn.Linear(4, 3)
    y = CheckpointFunction.apply(module, 1, torch.randn(2, 4), module.weight)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(3,\)"):
        y.sum().backward()


@pytest.mark.parametrize("nested", [False, True])
def test_an_input_changed_in_place_is_an_error(nested):
    x, weight = torch.randn(2), torch.randn(2, requires_grad=True)
    given = {"x": [x]} if nested else x
    y = CheckpointFunction.apply(lambda one: (one["x"][0] if nested else one) * weight, 1, given, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((3, 1, torch.ones(1)), TypeError, "got int"),
        ((torch.sin, 1.0, torch.ones(1)), TypeError, "got 1.0"),
        ((torch.sin, 2, torch.ones(1)), ValueError, "between 0 and the 1 arguments given, got 2"),
        ((torch.sin, 1, torch.ones(1), "w"), TypeError, "got str at position 1"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=message):
        CheckpointFunction.apply(*args)
