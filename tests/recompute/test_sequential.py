"""Tests of checkpoint_sequential and CheckpointSequential: chains of layers in segments."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from same import assert_same, gradients
from torch import Tensor, nn

from hvd_ckpt.recompute import CheckpointSequential, checkpoint_sequential, is_recomputing

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Counted(nn.Module):
    """A layer that counts its recomputations."""

    def __init__(self):
        super().__init__()
        self.linear, self.recomputations = nn.Linear(4, 4), 0

    def forward(self, x):
        self.recomputations += is_recomputing()
        return self.linear(x).tanh().sin()


def chain(length=5):
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(length)))


def recomputed(model):
    return [layer.recomputations for layer in model]


@VARIANTS
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "segments, keep_last, expected",
    [
        (2, True, [1, 1, 0, 0, 0]),
        (2, False, [1, 1, 1, 1, 1]),
        (3, True, [1, 1, 0, 0, 0]),
        ([1, 3, 1], True, [1, 1, 1, 1, 0]),
        (1, True, [0, 0, 0, 0, 0]),
        (1, False, [1, 1, 1, 1, 1]),
        (5, True, [1, 1, 1, 1, 0]),
    ],
)
def test_equals_the_plain_chain(use_reentrant, needs_grad, segments, keep_last, expected):
    model, x = chain(), torch.randn(3, 4, requires_grad=needs_grad)
    y = model(x)
    y.sum().backward()
    plain = [y, *gradients(model), x.grad]
    model.zero_grad()
    x.grad = None
    # The input by its name, as in PyTorch.
    out = checkpoint_sequential(model, segments, input=x, use_reentrant=use_reentrant, keep_last=keep_last)
    out.sum().backward()
    assert_same([out, *gradients(model), x.grad], plain)
    assert recomputed(model) == expected


class Fork(nn.Module):
    def forward(self, x, count):
        return x.sin(), x.cos(), count + 1


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, left, right, count, scale=1, **extra):
        return left * self.weight * scale, right + left.exp() * extra.get("shift", 0), count + 1


def product_of_all(parts):
    """A layer that takes the tuple that the layer before it returns as one argument."""
    left, right, count = parts
    return left * right * count


@VARIANTS
@pytest.mark.parametrize("segments", [1, 2, [1, 2, 1], 4])
def test_several_values_shared_keywords_and_non_tensors(use_reentrant, segments):
    def run(segments, keep_last):
        layers = [Fork(), Mix(), Mix(), product_of_all]
        x = torch.linspace(0, 1, 4, requires_grad=True)
        shared = {name: torch.full((4,), 2.0).requires_grad_() for name in ("scale", "shift")}
        options = {"use_reentrant": use_reentrant, "keep_last": keep_last, **shared}
        y = checkpoint_sequential(layers, segments, x, 3, **options)
        y.sum().backward()
        leaves = (x, *shared.values(), layers[1].weight, layers[2].weight)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    assert_same(run(segments, False), run(1, True), 1e-6)
    model = CheckpointSequential([Fork(), Mix()], 2, use_reentrant, keep_last=False)
    left, _, count = model(torch.ones(4, requires_grad=True), 3, scale=2)  # the last layer may return a tuple
    assert left.requires_grad and count == 5


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@VARIANTS
def test_a_result_of_named_parts_reaches_the_next_layer_as_it_is(use_reentrant):
    layers = [lambda x: Pair(x.sin(), x.cos()), lambda pair: pair.first * pair.second]
    x = torch.randn(3, requires_grad=True)
    y = checkpoint_sequential(layers, 1, x, use_reentrant=use_reentrant, keep_last=False)
    assert torch.equal(y, x.sin() * x.cos())


@pytest.mark.parametrize("make", [CheckpointSequential, checkpoint_sequential])
@pytest.mark.parametrize(
    "layers, segments, error, message",
    [
        (chain(), 0, ValueError, "at least 1, got 0"),
        (chain(), 6, ValueError, "at most the number of layers, 5, got 6"),
        (chain(), True, TypeError, "got True of type bool"),
        (chain(), 2.0, TypeError, r"got 2.0 of type float"),
        (chain(), [2, 2], ValueError, r"\[2, 2\] have 4 layers together, but there are 5"),
        (chain(), [5, 0], ValueError, "at least 1 layer, got 0"),
        (chain(), [True, 4], TypeError, "got True in"),
        (nn.Linear(2, 2), 1, TypeError, "sequence of callables, got Linear"),
        ([nn.Tanh(), 3], 1, TypeError, "[Ll]ayer 1 .*is of type"),
    ],
)
def test_bad_arguments(make, layers, segments, error, message):
    with pytest.raises(error, match=message):
        make(layers, segments, *[torch.randn(3, 4)] * (make is checkpoint_sequential))


class Own(nn.Sequential):
    def forward(self, input):
        return input


def test_bad_keywords_and_layers_of_a_module():
    with pytest.raises(TypeError, match="None of the 2 layers accepts the keyword argument 'mask'"):
        checkpoint_sequential([nn.ReLU(), nn.ReLU()], 1, torch.randn(2), mask=None)
    with pytest.raises(TypeError, match="Own has a forward of its own"):
        CheckpointSequential(Own(nn.ReLU()), 1)
    with pytest.raises(TypeError, match="layer 0 is of type"):
        CheckpointSequential([torch.sin], 1)


@VARIANTS
@pytest.mark.parametrize(
    "layers, values, message",
    [
        ([nn.ReLU(), nn.Linear(5, 2)], 1, r"2 of 2 \(layer 1: Linear\).*float32 tensor of shape \(3, 4\)"),
        ([nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 2), nn.Tanh()], 1, r"\(layers 2 to 3: Linear, Tanh\)"),
        ([Fork(), Fork()], 2, r"segment 2 of 2 \(layer 1: Fork\).*the layer before it returns 3 values"),
        ([Fork(), Fork()], 3, r"segment 1 of 2.*the model was given 3 values"),
        ([torch.sin, Fork()], 1, r"segment 2 of 2 \(layer 1: Fork\).*missing 1 required positional"),
    ],
)
def test_values_that_do_not_fit_name_the_segment(use_reentrant, layers, values, message):
    x, error = torch.randn(3, 4, requires_grad=True), TypeError if Fork in map(type, layers) else RuntimeError
    with pytest.raises(error, match=message) as caught:
        checkpoint_sequential(layers, 2, *[x, 1, 2][:values], use_reentrant=use_reentrant)
    assert error is TypeError or "multiplied" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("memory"), HorovodInternalError("rank"), KeyError("key"), ValueError("again")],
)
@VARIANTS
def test_errors_with_a_meaning_of_their_own_pass_unchanged(error, use_reentrant):
    def fail(x):
        if is_recomputing() or not isinstance(error, ValueError):  # that comes in a recomputation alone
            raise error
        return x.sin()

    layers, x = [torch.sin, fail, torch.cos], torch.randn(2, requires_grad=True)
    with pytest.raises(type(error)) as caught:
        checkpoint_sequential(layers, 3, x, use_reentrant=use_reentrant).sum().backward()
    assert caught.value is error


def named():
    stem = nn.Linear(4, 4)  # which is used twice
    return nn.Sequential(OrderedDict(stem=stem, act=nn.Tanh(), body=nn.Sequential(stem), head=nn.Sigmoid()))


def test_a_module_keeps_names_and_state_is_copied_pickled_sliced_and_grows():
    plain, x = named(), torch.randn(2, 4)
    model = CheckpointSequential(plain, segments=2, keep_last=False)
    one, other = (torch.autograd.grad(chain(x).sum(), plain.stem.weight) for chain in (plain, model))
    assert_same(one, other, 1e-6)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert model.stem is plain.stem
    assert "segments=2" in repr(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, CheckpointSequential) and isinstance(twin, nn.Sequential)
        assert torch.equal(twin(input=x), plain(x))
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    assert isinstance(model[-1], nn.Sigmoid)
    assert CheckpointSequential(plain.eval(), 2).training is False
    assert list(CheckpointSequential([nn.ReLU(), nn.Linear(2, 2)], 1).state_dict()) == ["1.weight", "1.bias"]
    model.append(nn.Linear(4, 1))
    assert model(x).shape == (2, 1)
    fixed = CheckpointSequential(named(), [3, 1])
    fixed.append(nn.ReLU())
    with pytest.raises(ValueError, match="4 layers together, but there are 5"):
        fixed(x)


@VARIANTS
def test_a_module_recomputes_wherever_gradients_are_wanted(use_reentrant):
    model = CheckpointSequential(chain(), 2, use_reentrant=use_reentrant)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    assert recomputed(model) == [1, 1, 0, 0, 0]
    model.eval()(x).sum().backward()  # fine-tuning with frozen statistics
    assert recomputed(model) == [2, 2, 0, 0, 0]
