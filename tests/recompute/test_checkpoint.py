"""Tests of checkpoint() and CheckpointFunction: equal results with less memory, for any arguments and results."""

import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from same import assert_same
from torch import nn
from ways import EVERY_KIND, VARIANTS, by_function, plainly, reentrant, saving

from hvd_ckpt.recompute import CheckpointFunction, checkpoint, is_checkpointing, is_recomputing
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.frames import remembered

KINDS = {
    "non-reentrant": checkpoint,
    "reentrant": reentrant,
    "CheckpointFunction": by_function,
    "selective": saving(torch.ops.aten.sin.default),
}
NESTINGS = [*itertools.product(KINDS, repeat=2)]


@EVERY_KIND
def test_activations_are_not_kept_and_flags_tell_the_passes(run):
    flags, inner = [], []

    def function(x):
        flags.append((is_checkpointing(), is_recomputing()))
        hidden = x.exp()
        inner.append(weakref.ref(hidden))
        return hidden.sin()

    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        run(function, x)
    inner.clear()
    y = run(function, x)
    gc.collect()
    assert inner[0]() is None and not is_checkpointing()
    y.sum().backward()
    assert flags == [(False, False), (True, False), (False, True)]  # without gradients it simply runs
    assert x.grad is not None and not is_checkpointing() and not is_recomputing()


@VARIANTS
def test_keywords_containers_and_non_tensors(run):
    def compute(x, table, *, args, function_, nothing):
        assert function_ == "double" and nothing is None
        table.setdefault("note", 7)
        hidden = (x * table["items"][0]).sin() * args * table["factor"]
        return {"hidden": hidden, "rest": [hidden.cos(), hidden.detach().argmax(), None, function_]}

    def outcome(run):
        torch.manual_seed(0)
        leaves = [torch.randn(4, requires_grad=True) for _ in range(3)]
        table = {"items": leaves[1:2], "factor": 2.5}
        out = run(compute, leaves[0], table, args=leaves[2], function_="double", nothing=None)
        assert table["note"] == 7  # what the function does to its containers is seen
        (out["hidden"].square() + out["rest"][0]).sum().backward()
        return [*(leaf.grad for leaf in leaves), out]

    assert_same(outcome(plainly), outcome(run))


@pytest.mark.parametrize(
    "run",
    [
        checkpoint,
        reentrant,
        lambda function, x, rest: CheckpointFunction.apply(function, 2, x, rest, *[function.weight] * 2),
    ],
)
def test_a_tensor_that_is_given_twice_is_one_tensor_again(run):
    x, same = torch.randn(4, 4, requires_grad=True), []

    def function(left, rest):
        same.append(left is rest["again"])
        return ((left @ function.weight).sin() * rest["again"] @ function.weight).sin()

    function.weight = nn.Parameter(torch.randn(4, 4))
    expected = torch.autograd.grad(function(x, {"again": x}).sum(), [x, function.weight])
    run(function, x, {"again": x}).sum().backward()
    assert_same((x.grad, function.weight.grad), expected)
    assert same == [True] * 3


@pytest.mark.parametrize(
    "run",
    [
        lambda x, weight: checkpoint(lambda one, scale: (one * scale).sin(), weight, scale=x),
        lambda x, weight: checkpoint(lambda given: (weight * given["x"]).tanh(), {"x": x}),
        lambda x, weight: by_function(lambda one, weight: one * weight, x, weight),
        lambda x, weight: by_function(lambda given, weight: given["x"][0] * weight, {"x": [x]}, weight),
    ],
    ids=["keyword", "container", "CheckpointFunction", "CheckpointFunction container"],
)
def test_an_input_changed_in_place_is_an_error(run):
    x = torch.randn(2)
    y = run(x, torch.randn(2, requires_grad=True))
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@VARIANTS
def test_no_arguments_at_all_and_the_mode_of_the_first_pass(run):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6)).eval()
    x, modes = nn.Parameter(torch.randn(4, 6)), []

    def function():
        modes.append(model[2].training)
        return model(x)

    (expected,) = torch.autograd.grad(function().square().sum(), x)
    y = run(function)
    model.train()
    y.square().sum().backward()
    assert torch.equal(x.grad, expected) and modes == [False] * 3
    assert all(module.training for module in model.modules())


def test_early_stop_and_no_preserved_random_state():
    steps, x = [], torch.ones(1000, requires_grad=True)

    def function(x):
        steps.append(1)
        y = x.sin().cos()
        steps.append(2)
        return y

    checkpoint(function, x).sum().backward()
    assert steps == [1, 2, 1]  # the recomputation stopped at the last saved tensor
    checkpoint(function, x, early_stop=False).sum().backward()
    assert steps == [1, 2, 1, 1, 2, 1, 2]
    x.grad = None
    y = checkpoint(nn.functional.dropout, x, preserve_rng_state=False)
    y.square().sum().backward()
    assert not torch.equal(x.grad == 0, y == 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: checkpoint(3, x), TypeError, "got int"),
        (lambda x: checkpoint(torch.sin, x, use_reentrant="yes"), TypeError, "use_reentrant .*'yes'"),
        (lambda x: reentrant(torch.sin, x, debug=True), ValueError, "use_reentrant=False"),
        (lambda x: checkpoint(torch.sin, x, determinism_check="perhaps"), ValueError, "determinism_check"),
        (lambda x: CheckpointFunction.apply(3, 1, x), TypeError, "got int"),
        (lambda x: CheckpointFunction.apply(torch.sin, 1.0, x), TypeError, "got 1.0"),
        (lambda x: CheckpointFunction.apply(torch.sin, 2, x), ValueError, "between 0 and the 1 .*, got 2"),
        (lambda x: CheckpointFunction.apply(torch.sin, 1, x, "w"), TypeError, "got str at position 1"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, requires_grad=True))


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


def test_a_reentrant_region_that_is_recomputed_for_nothing():
    layer, head = nn.Linear(3, 3), nn.Linear(3, 3)
    y = reentrant(lambda x: layer(x).detach(), torch.randn(1, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="requires_grad=True"):
        y.sum().backward()
    hidden = reentrant(lambda x: layer(x).detach(), torch.randn(2, 3))
    with pytest.warns(UserWarning, match="recomputed for nothing"):
        head(hidden).sum().backward()
    assert layer.weight.grad is None and head.weight.grad is not None


def test_gradients_of_gradients():
    x = torch.randn(2, requires_grad=True)
    (slope,) = torch.autograd.grad(CheckpointFunction.apply(torch.sin, 1, x).sum(), x, create_graph=True)
    assert_same(torch.autograd.grad(slope.sum(), x), (-x.detach().sin(),))
    y = reentrant(torch.sin, x)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        y.sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="does not work with .*grad"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize(("outer", "inner"), NESTINGS)
def test_a_remembered_value_is_computed_once_in_nested_regions(outer, inner):
    computed = []

    def once(x):
        def compute():
            computed.append(1)
            return float(len(computed)) * x.detach().sin().mean()  # an operator that selective ones count

        return x.sin() * remembered(compute)

    def outside(x):
        return once(KINDS[inner](lambda y: once(once(y)).cos(), once(x))).cos()

    x = torch.randn(3, requires_grad=True)
    y = KINDS[outer](outside, x)
    passes = 1 if "selective" in (outer, inner) else 2
    for _ in range(passes):
        y.sum().backward(retain_graph=True)
    assert len(computed) == 4
    computed.clear()
    (expected,) = torch.autograd.grad(once(once(once(once(x))).cos()).cos().sum(), x)
    assert torch.allclose(x.grad, passes * expected)


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


def test_parameters_listed_or_not_get_their_gradients_once_however_many_regions_use_them():
    module, accumulated, x = nn.Linear(4, 4), [], torch.randn(2, 4)
    module.weight.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))
    for _ in range(3):
        x = CheckpointFunction.apply(lambda x: module(x).sin(), 1, x, module.weight)
    x.sum().backward()
    assert len(accumulated) == 1 and module.bias.grad is not None


@pytest.mark.parametrize("leaf", [True, False])
def test_tensor_hooks_run_once(leaf):
    parameter, x, calls = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4), []

    def double(gradient):
        calls.append(1)
        return gradient * 2

    def gradient(recomputed):
        weight = parameter if leaf else parameter * 1
        hook, parameter.grad = weight.register_hook(double), None
        y = CheckpointFunction.apply(lambda x: x @ weight, 1, x, weight) if recomputed else x @ weight
        y.sum().backward()
        hook.remove()
        return parameter.grad

    assert_same(gradient(False), gradient(True))
    assert len(calls) == 2


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_listed_parameter_that_is_changed_or_frozen_before_the_backward_pass(mode):
    x, weight = torch.randn(2, requires_grad=True), nn.Parameter(torch.randn(2))
    hidden = SimpleNamespace(inner=SimpleNamespace(weight=weight))  # where nobody looks

    def run():
        return CheckpointFunction.apply(lambda one: one * hidden.inner.weight.exp(), 1, x, weight).sum()

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
