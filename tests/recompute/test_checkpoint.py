"""Tests of checkpoint() and CheckpointFunction: equal results with less memory, for any arguments and results."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections import namedtuple

import pytest
import torch
from same import assert_same
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from ways import EVERY_KIND, VARIANTS, WAYS, plainly, reentrant

from hvd_ckpt.recompute import CheckpointFunction, checkpoint, is_checkpointing, is_recomputing
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.frames import remembered

KINDS = ("non-reentrant", "reentrant", "CheckpointFunction")
NESTINGS = pytest.mark.parametrize(("outer", "inner"), [*itertools.product(KINDS, repeat=2)])


class Recorder(nn.Module):
    """Notes what the flags say each time it runs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((is_checkpointing(), is_recomputing()))
        return x.sin()


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6), nn.Tanh())


def test_without_preserved_random_state_dropout_differs():
    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(nn.functional.dropout, x, preserve_rng_state=False)
    y.square().sum().backward()
    assert not torch.equal(x.grad == 0, y == 0)


@EVERY_KIND
def test_activations_are_not_kept(run):
    inner = []

    def function(x):
        hidden = x.exp()
        inner.append(weakref.ref(hidden))
        return hidden.sin()

    x = torch.randn(4, requires_grad=True)
    y = run(function, x)
    gc.collect()
    assert inner[0]() is None
    y.sum().backward()
    assert len(inner) == 2
    assert x.grad is not None


@EVERY_KIND
def test_flags_tell_the_first_pass_from_the_recomputation(run):
    module = Recorder()
    x = torch.randn(3, requires_grad=True)
    module(x)
    y = run(module, x)
    assert not is_checkpointing() and not is_recomputing()
    y.sum().backward()
    assert module.seen == [(False, False), (True, False), (False, True)]
    assert not is_checkpointing() and not is_recomputing()


@EVERY_KIND
def test_without_gradients_the_function_simply_runs(run):
    module = Recorder()
    with torch.no_grad():
        run(module, torch.randn(3, requires_grad=True))
    assert module.seen == [(False, False)]


@EVERY_KIND
def test_flags_are_restored_when_the_function_raises(run):
    runs = []

    def function(x, fail_at):
        runs.append(None)
        if len(runs) == fail_at:
            raise KeyError("broken")
        return x.sin().cos()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError, match="broken"):
        run(function, x, 1)
    assert not is_checkpointing()
    runs.clear()
    y = run(function, x, 2)
    with pytest.raises(KeyError, match="broken"):
        y.sum().backward()
    assert not is_recomputing()


@VARIANTS
def test_nested_structures_keywords_and_non_tensors(run):
    Pair = namedtuple("Pair", ["left", "right"])

    def compute(x, pair, table, *, args, function_, nothing):
        assert function_ == "double" and nothing is None and isinstance(pair, Pair)
        table.setdefault("note", 7)
        hidden = (x * pair.left + table["items"][0] * pair.right).sin() * args * table["factor"]
        return {"hidden": hidden, "rest": [hidden.cos(), Pair(3, hidden.detach().argmax()), None, function_]}

    def outcome(run):
        torch.manual_seed(0)
        x, left, right, item, scale = (torch.randn(4, requires_grad=True) for _ in range(5))
        table = {"items": [item], "factor": 2.5}
        out = run(compute, x, Pair(left, right), table, args=scale, function_="double", nothing=None)
        assert table["note"] == 7  # what the function does to its containers is seen
        (out["hidden"].square() + out["rest"][0]).sum().backward()
        return [tensor.grad for tensor in (x, left, right, item, scale)], out

    (plain, plain_out), (recomputed, out) = outcome(plainly), outcome(run)
    assert all(gradient is not None for gradient in plain)
    assert_same(plain, recomputed)
    assert isinstance(out["rest"][1], Pair) and out["rest"][1].left == 3
    assert torch.equal(out["rest"][1].right, plain_out["rest"][1].right)
    assert out["rest"][2:] == [None, "double"]


def test_a_keyword_tensor_changed_in_place_is_an_error():
    x, scale = torch.randn(3, requires_grad=True), torch.ones(3)
    y = checkpoint(lambda x, scale: (x * scale).sin(), x, scale=scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@VARIANTS
def test_no_arguments_at_all(run):
    parameter, runs = nn.Parameter(torch.ones(3)), []

    def function():
        runs.append(None)
        return parameter.exp().sin()

    run(function).sum().backward()
    assert parameter.grad is not None
    assert len(runs) == 2


def test_a_reentrant_region_without_gradients_is_an_error():
    layer = nn.Linear(2, 2)
    y = reentrant(lambda x: layer(x).detach(), torch.randn(1, 2, requires_grad=True))
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        y.sum().backward()


def test_a_reentrant_region_some_of_whose_results_need_gradients():
    x = torch.randn(2, requires_grad=True)
    constant, result = reentrant(lambda x: (x.detach().sin(), x.cos()), x)
    constant.sum().backward(retain_graph=True)
    assert x.grad is None
    result.sum().backward()
    assert torch.equal(x.grad, -x.detach().sin())


def test_a_reentrant_region_of_which_nothing_needs_a_gradient_keeps_nothing():
    class Hidden:  # where nobody looks
        layer = nn.Linear(3, 3)

    x = torch.randn(2, 3)
    alive = weakref.ref(x)
    y = reentrant(lambda x: x.sin().cos(), x)
    del x
    gc.collect()
    assert alive() is None and not y.requires_grad
    reentrant(lambda x: Hidden.layer(x), y).sum().backward()
    assert Hidden.layer.weight.grad is not None


def test_a_reentrant_region_that_is_recomputed_for_nothing_warns():
    layer, head = nn.Linear(3, 3), nn.Linear(3, 3)
    hidden = reentrant(lambda x: layer(x).detach(), torch.randn(2, 3))
    with pytest.warns(UserWarning, match="recomputed for nothing"):
        head(hidden).sum().backward()
    assert layer.weight.grad is None
    assert head.weight.grad is not None


def test_early_stop_and_context_fn_reach_pytorch():
    entered, steps = [], []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield

    def function(x):
        steps.append(1)
        y = x.sin().cos()
        steps.append(2)
        return y

    x = torch.randn(3, requires_grad=True)
    contexts = (note("first pass"), note("recomputation"))
    checkpoint(function, x, context_fn=lambda: contexts).sum().backward()
    assert entered == ["first pass", "recomputation"]
    assert steps == [1, 2, 1]  # the recomputation stopped at the last saved tensor
    steps.clear()
    checkpoint(function, x, early_stop=False).sum().backward()
    assert steps == [1, 2, 1, 2]


def test_selective_checkpointing_with_a_remembered_value():
    # The remembered computation uses the same operators as the region, which selective checkpointing counts.
    def function(x):
        scale = remembered(lambda: (2 * x.detach() @ x.detach()).mean())
        return (x @ x).sin() @ x * scale

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    x = torch.randn(3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    checkpoint(function, x, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, expected)


@NESTINGS
def test_a_remembered_value_is_computed_once_in_nested_regions(outer, inner):
    computed = []

    def once(x):
        def compute():
            computed.append(1)
            return float(len(computed))

        return x.sin() * remembered(compute)

    def inside(x):
        return once(once(x)).cos()

    def outside(x):
        return once(WAYS[inner](inside, once(x))).cos()

    x = torch.randn(3, requires_grad=True)
    y = WAYS[outer](outside, x)
    assert len(computed) == 4
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(computed) == 4
    gradient, x.grad = x.grad, None
    computed.clear()
    once(once(once(once(x))).cos()).cos().sum().backward()
    assert torch.allclose(gradient, 2 * x.grad)


def test_a_remembered_value_of_a_function_that_changes_is_an_error():
    runs = []

    def function(x):
        runs.append(None)
        for _ in runs:
            x = x * remembered(lambda: 2.0)
        return x.sin()

    y = checkpoint(function, torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="asked for 2 value"):
        y.sum().backward()


@VARIANTS
def test_training_mode_switched_before_the_backward_pass(run):
    model = mlp().eval()
    x = torch.randn(4, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    y = run(model, x)
    model.train()
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)
    assert all(module.training for module in model.modules())


def test_errors():
    x = torch.randn(2, requires_grad=True)
    with pytest.raises(TypeError, match="got int"):
        checkpoint(3, x)
    with pytest.raises(TypeError, match="use_reentrant .*'yes'"):
        checkpoint(torch.sin, x, use_reentrant="yes")
    with pytest.raises(ValueError, match="use_reentrant=False"):
        reentrant(torch.sin, x, debug=True)
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, x, determinism_check="perhaps")


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


def test_gradients_of_gradients():
    x = torch.randn(2, requires_grad=True)
    (slope,) = torch.autograd.grad(CheckpointFunction.apply(torch.sin, 1, x).sum(), x, create_graph=True)
    assert_same(torch.autograd.grad(slope.sum(), x), (-x.detach().sin(),))
    y = reentrant(torch.sin, x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        y.sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="does not work with .*grad"):
        torch.autograd.grad(y.sum(), x)


def test_a_parameter_that_is_not_listed_gets_its_gradient():
    module = nn.Linear(4, 3)
    CheckpointFunction.apply(module, 1, torch.randn(2, 4), module.weight).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_listed_parameter_that_is_changed_or_frozen_before_the_backward_pass(mode):
    class Holder:
        def __init__(self):
            self.inner = type("Inner", (), {"weight": nn.Parameter(torch.randn(2))})()

    x, holder = torch.randn(2, requires_grad=True), Holder()
    weight = holder.inner.weight

    def run():
        return CheckpointFunction.apply(lambda one: one * holder.inner.weight.exp(), 1, x, weight).sum()

    with verifying(mode):
        y = run()
        weight.requires_grad_(False)
        y.backward()
        assert_same((weight.grad, weight.requires_grad, x.grad), (None, False, weight.exp()))
        weight.requires_grad_()
        for _ in range(2):
            y = run()
            with torch.no_grad():
                weight.add_(1)
            with pytest.raises(RuntimeError, match="'CheckpointFunction' needs .* by an inplace operation"):
                y.backward()


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
def test_errors_of_the_function(args, error, message):
    with pytest.raises(error, match=message):
        CheckpointFunction.apply(*args)
