"""Tests of checkpoint_sequential and CheckpointSequential: chains of layers in segments."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from same import assert_same, gradients
from torch import nn

from hvd_ckpt.recompute import CheckpointSequential, checkpoint_sequential, is_recomputing

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Counted(nn.Module):
    """A layer that counts its first passes and its recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first_passes = self.recomputations = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            self.recomputations += 1
        else:
            self.first_passes += 1
        return self.linear(x).tanh().sin()


def chain(length: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(length)))


def recomputed(model: nn.Sequential) -> list[int]:
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
def test_equals_the_plain_chain(
    use_reentrant: bool, needs_grad: bool, segments: Any, keep_last: bool, expected: list[int]
) -> None:
    model, x = chain(), torch.randn(3, 4, requires_grad=needs_grad)
    model(x).sum().backward()
    plain, plain_input = gradients(model), x.grad
    model.zero_grad()
    x.grad = None
    out = checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant, keep_last=keep_last)
    out.sum().backward()
    assert_same([*plain, plain_input], [*gradients(model), x.grad])
    assert recomputed(model) == expected


def test_the_input_by_name_as_in_pytorch() -> None:
    model, x = chain(), torch.randn(3, 4)
    assert torch.equal(checkpoint_sequential(model, 2, input=x), model(x))
    assert torch.equal(CheckpointSequential(model, 2)(input=x), model(x))


class Fork(nn.Module):
    def forward(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return x.sin(), x.cos(), count + 1


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, count: int, scale: Any = 1, **extra: Any
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        return left * self.weight * scale, right + left.exp() * extra.get("shift", 0), count + 1


class Together(nn.Module):
    """Takes the tuple that the layer before it returns as one argument."""

    def forward(self, parts: Any) -> torch.Tensor:
        left, right, count = parts
        return left * right * count


@VARIANTS
@pytest.mark.parametrize("segments", [1, 2, [1, 2, 1], 4])
def test_several_values_shared_keywords_and_non_tensors(use_reentrant: bool, segments: Any) -> None:
    def run(segments: Any, keep_last: bool) -> tuple[Any, ...]:
        layers = [Fork(), Mix(), Mix(), Together()]
        x = torch.linspace(0, 1, 4, requires_grad=True)
        scale = torch.full((4,), 2.0, requires_grad=True)
        shift = torch.tensor(0.5, requires_grad=True)
        y = checkpoint_sequential(
            layers, segments, x, 3, scale=scale, shift=shift, use_reentrant=use_reentrant, keep_last=keep_last
        )
        y.sum().backward()
        return y, x.grad, scale.grad, shift.grad, layers[1].weight.grad, layers[2].weight.grad

    plain = run(1, True)
    assert all(value is not None for value in plain)
    for one, other in zip(plain, run(segments, False)):
        assert torch.allclose(one, other, rtol=1e-6)
    model = CheckpointSequential([Fork(), Mix()], 2, use_reentrant, keep_last=False)
    left, _, count = model(torch.ones(4, requires_grad=True), 3, scale=2)  # the last layer may return a tuple
    assert left.requires_grad and count == 5


@pytest.mark.parametrize(
    "segments, error, message",
    [
        (0, ValueError, "at least 1, got 0"),
        (6, ValueError, "at most the number of layers, 5, got 6"),
        (True, TypeError, "got True of type bool"),
        (2.0, TypeError, r"got 2.0 of type float"),
        ([2, 2], ValueError, r"\[2, 2\] have 4 layers together, but there are 5"),
        ([5, 0], ValueError, "at least 1 layer, got 0"),
        ([True, 4], TypeError, "got True in"),
    ],
)
def test_bad_segments(segments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checkpoint_sequential(chain(), segments, torch.randn(3, 4))
    with pytest.raises(error, match=message):
        CheckpointSequential(chain(), segments)


def test_bad_functions() -> None:
    with pytest.raises(TypeError, match="sequence of callables, got Linear"):
        checkpoint_sequential(nn.Linear(2, 2), 1, torch.randn(1, 2))
    with pytest.raises(TypeError, match="Layer 1 cannot be called: it is of type int"):
        checkpoint_sequential([torch.sin, 3], 1, torch.randn(1, 2))
    with pytest.raises(TypeError, match="None of the 2 layers accepts the keyword argument 'mask'"):
        checkpoint_sequential([nn.ReLU(), nn.ReLU()], 1, torch.randn(2), mask=None)


@VARIANTS
def test_shapes_that_do_not_fit_name_the_segment(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 2), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(
        RuntimeError,
        match=r"segment 2 of 2 \(layers 2 to 3: Linear, Tanh\).*float32 tensor of shape \(3, 4\)",
    ) as caught:
        checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)
    assert "multiplied" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=r"segment 2 of 4 \(layer 1: Linear\)"):
        checkpoint_sequential([torch.sin, nn.Linear(5, 4), *chain(2)], 4, x, use_reentrant=use_reentrant)


@VARIANTS
def test_wrong_number_of_values_names_the_segment(use_reentrant: bool) -> None:
    x = torch.randn(4, requires_grad=True)
    two = Fork()
    with pytest.raises(
        TypeError, match=r"segment 2 of 2 \(layer 1: Fork\).*the layer before it returns 3 values"
    ):
        checkpoint_sequential([two, two], 2, x, 1, use_reentrant=use_reentrant)
    with pytest.raises(TypeError, match=r"segment 1 of 2.*the model was given 3 values"):
        checkpoint_sequential([two, two], 2, x, 1, 2, use_reentrant=use_reentrant)
    with pytest.raises(TypeError, match=r"segment 2 of 2 \(layer 1: Fork\).*missing 1 required positional"):
        checkpoint_sequential([torch.sin, two], 2, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), HorovodInternalError("rank lost"), KeyError("k")]
)
def test_errors_with_a_meaning_of_their_own_pass_unchanged(error: Exception) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        checkpoint_sequential([torch.sin, fail], 2, torch.randn(2))
    assert caught.value is error


@VARIANTS
def test_an_error_in_the_recomputation_passes_unchanged(use_reentrant: bool) -> None:
    error = ValueError("only the second time")

    def fail(x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            raise error
        return x.sin()

    y = checkpoint_sequential(
        [fail, torch.cos], 2, torch.randn(2, requires_grad=True), use_reentrant=use_reentrant
    )
    with pytest.raises(ValueError, match="only the second time") as caught:
        y.sum().backward()
    assert caught.value is error


def named() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(4, 4), act=nn.Tanh(), body=nn.Sequential(nn.Linear(4, 4)), head=nn.Sigmoid()
        )
    )


def test_module_keeps_names_and_state() -> None:
    plain = named()
    model = CheckpointSequential(plain, segments=2)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert model.stem is plain.stem
    assert isinstance(model, nn.Sequential)
    assert "segments=2" in repr(model)
    assert CheckpointSequential(plain.eval(), 2).training is False
    assert list(CheckpointSequential([nn.ReLU(), nn.Linear(2, 2)], 1).state_dict()) == ["1.weight", "1.bias"]


def test_module_with_a_layer_used_twice() -> None:
    layer = nn.Linear(4, 4)
    plain = nn.Sequential(layer, nn.Tanh(), layer)
    model = CheckpointSequential(plain, 3, keep_last=False)
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 4)
    plain(x).sum().backward()
    expected = layer.weight.grad
    layer.zero_grad()
    model(x).sum().backward()
    assert torch.allclose(layer.weight.grad, expected)


@VARIANTS
def test_module_recomputes_wherever_gradients_are_wanted(use_reentrant: bool) -> None:
    model = CheckpointSequential(chain(), 2, use_reentrant=use_reentrant)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    assert recomputed(model) == [1, 1, 0, 0, 0]
    with torch.no_grad():
        model(x)
    assert recomputed(model) == [1, 1, 0, 0, 0]
    model.eval()(x).sum().backward()  # fine-tuning with frozen statistics
    assert recomputed(model) == [2, 2, 0, 0, 0]


def test_module_copies_pickles_slices_and_grows() -> None:
    model, x = CheckpointSequential(named(), 2), torch.randn(2, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, CheckpointSequential)
        assert torch.equal(twin(x), model(x))
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    assert isinstance(model[-1], nn.Sigmoid)
    model.append(nn.Linear(4, 1))
    assert model(x).shape == (2, 1)
    fixed = CheckpointSequential(named(), [3, 1])
    fixed.append(nn.ReLU())
    with pytest.raises(ValueError, match="4 layers together, but there are 5"):
        fixed(x)


def test_module_refuses_what_it_would_not_run() -> None:
    class Own(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    with pytest.raises(TypeError, match="Own has a forward of its own"):
        CheckpointSequential(Own(nn.ReLU()), 1)
    with pytest.raises(TypeError, match="layer 0 is of type"):
        CheckpointSequential([torch.sin], 1)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@VARIANTS
def test_a_result_of_named_parts_reaches_the_next_layer_as_it_is(use_reentrant: bool) -> None:
    layers = [lambda x: Pair(x.sin(), x.cos()), lambda pair: pair.first * pair.second]
    x = torch.randn(3, requires_grad=True)
    y = checkpoint_sequential(layers, 1, x, use_reentrant=use_reentrant, keep_last=False)
    assert torch.equal(y, x.sin() * x.cos())
