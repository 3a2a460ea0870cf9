"""Recomputation with the state of the first pass: containers, shared tensors, and what is frozen or unfrozen between the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from selective import drop_all
from torch import nn

from hvd_ckpt.recompute import (
    CheckpointFunction,
    CheckpointSequential,
    RecomputationMismatch,
    checkpoint,
)
from hvd_ckpt.recompute.tape import run_selectively

STEPS = 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_first_write_of_another_modules_weight_is_an_error(use_reentrant: bool) -> None:
    layer = nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            layer.weight.mul_(0.9)
        return torch.tanh(layer(x))

    y = checkpoint(function, torch.randn(4, 8, requires_grad=True), use_reentrant=use_reentrant)
    with pytest.raises(
        RecomputationMismatch, match="'Linear.weight' was written .* from before are not known"
    ):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_tensor_of_no_module_that_is_resized(use_reentrant: bool) -> None:
    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        layer, held = nn.Linear(8, 8), torch.empty(0)

        def function(x: torch.Tensor) -> torch.Tensor:
            if not held.numel():
                held.resize_(8).fill_(1.0)
            y = torch.tanh(layer(x)) * held.clone()
            held.mul_(0.9)
            return y

        for _ in range(STEPS):
            x = torch.randn(4, 8)
            y = checkpoint(function, x, use_reentrant=use_reentrant) if recompute else function(x)
            y.square().sum().backward()
        return [layer.weight.grad, held]

    for ours, theirs in zip(gradients(True), gradients(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


class Centered(nn.Module):
    """Keeps a running mean as a frozen parameter, and writes it past its version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.layer = nn.Parameter(torch.zeros(8), requires_grad=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.mean.data).relu()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_parameter_that_is_written_past_its_version_counter(use_reentrant: bool) -> None:
    def trained(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module = Centered()
        for step in range(STEPS):
            x = torch.randn(4, 8, requires_grad=True)
            y = checkpoint(module, x, use_reentrant=use_reentrant) if recompute else module(x)
            y.square().sum().backward()
            module.layer.weight.data.sub_(0.1)  # as some optimizers do
            if step == 1:
                module.mean.data.zero_()
        return [module.layer.weight.grad, module.mean]

    for ours, theirs in zip(trained(True), trained(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_running_statistics_of_no_module(use_reentrant: bool) -> None:
    def trained(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        mean, variance, weight = torch.zeros(8), torch.ones(8), torch.randn(8, 8, requires_grad=True)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(x @ weight, mean, variance, training=True).relu()

        for _ in range(STEPS):
            x = torch.randn(4, 8, requires_grad=True)
            y = checkpoint(function, x, use_reentrant=use_reentrant) if recompute else function(x)
            y.square().sum().backward()
        return [weight.grad, mean, variance]

    for ours, theirs in zip(trained(True), trained(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


# ---------------------------------------------------------------------------------------- containers


def test_tensors_in_containers_are_watched_like_others() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(5, 8)
    y = checkpoint(lambda features: linear(features["x"]).tanh(), {"x": x})
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_tensor_that_is_given_twice_is_one_tensor_again(use_reentrant: bool) -> None:
    same = []
    linear, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)

    def function(first: torch.Tensor, rest: dict[str, torch.Tensor]) -> torch.Tensor:
        same.append(first is rest["again"])
        return torch.tanh(linear(first) * rest["again"]).sin()

    checkpoint(function, x, {"again": x}, use_reentrant=use_reentrant).sum().backward()
    assert same == [True, True]


class Cache:
    """An object that blocks write to."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self.calls = 0

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.states.append(x)
        self.calls += 1
        return torch.stack(self.states).sum(0)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return torch.tanh(self.linear(cache.update(torch.sin(x))))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_an_object_that_holds_tensors(use_reentrant: bool) -> None:
    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        blocks, x = nn.ModuleList(Caching() for _ in range(3)), torch.randn(5, 8, requires_grad=True)
        cache, y = Cache(), x
        for block in blocks:
            y = checkpoint(block, y, cache, use_reentrant=use_reentrant) if recompute else block(y, cache)
        y.square().sum().backward()
        assert cache.calls == 3 and len(cache.states) == 3
        return [x.grad, *(parameter.grad for parameter in blocks.parameters())]

    if use_reentrant:  # what the first pass has stored has no graph
        with pytest.raises(RuntimeError, match="without returning it"):
            gradients(True)
        return
    for ours, theirs in zip(gradients(True), gradients(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_reentrant_gradients_of_inputs_keep_their_strides() -> None:
    def gradient(recompute: bool) -> tuple[int, ...]:
        strides: list[tuple[int, ...]] = []
        x = torch.randn(2, 3, 4, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: strides.append(grad.stride()))

        def function(h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(h.transpose(1, 2).contiguous())

        out = checkpoint(function, y, use_reentrant=True) if recompute else function(y)
        out.square().sum().backward()
        return strides[0]

    assert gradient(True) == gradient(False)


class Weighted(nn.Module):
    """A layer with a buffer and an argument in a container, whose gradients can be asked for like those of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x) + self.offset) * more[0].exp()) * more[0]


def on_a_tape(block: Weighted, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    policy = drop_all(block, x.detach(), [more[0].detach()], keep=("linear",))
    return run_selectively(block, (x, more), {}, policy)


FREEZING: dict[str, Callable[..., torch.Tensor]] = {
    "non-reentrant": lambda block, x, more: checkpoint(block, x, more),
    "no early stop": lambda block, x, more: checkpoint(block, x, more, early_stop=False),
    "reentrant": lambda block, x, more: checkpoint(block, x, more, use_reentrant=True),
    "lambda": lambda block, x, more: checkpoint(lambda y: block(y, more), x),
    "reentrant lambda": lambda block, x, more: checkpoint(lambda y: block(y, more), x, use_reentrant=True),
    "CheckpointFunction": lambda block, x, more: CheckpointFunction.apply(
        lambda x, weight: block(x, [weight]), 2, x, *more, *block.parameters(), block.offset
    ),
    "segments": lambda block, x, more: CheckpointSequential([Partial(block, more)], 1, keep_last=False)(x),
    "reentrant segments": lambda block, x, more: CheckpointSequential(
        [Partial(block, more)], 1, True, keep_last=False
    )(x),
    "nested": lambda block, x, more: checkpoint(lambda x: checkpoint(block, x, more), x),
    "tape": on_a_tape,
}


class Partial(nn.Module):
    """A block with an attribute as its other argument."""

    def __init__(self, block: Weighted, more: list[torch.Tensor]) -> None:
        super().__init__()
        self.block, self.weight = block, more[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, [self.weight])


def gradients_around_a_change(
    run: Callable[..., torch.Tensor], at_forward: str, at_backward: str
) -> list[torch.Tensor | None]:
    """Gradients of a block, of which other tensors require them in the forward pass than in the backward pass."""
    torch.manual_seed(0)
    block, x, weight = Weighted(), torch.randn(5, 8, requires_grad=True), torch.randn(8)
    leaves = {"linear": [*block.linear.parameters()], "norm": [*block.norm.parameters()]}
    leaves |= {"offset": [block.offset], "argument": [weight], "input": [x]}

    def require(names: str) -> list[bool]:
        for name, tensors in leaves.items():
            for tensor in tensors:
                tensor.requires_grad_(name in names.split())
        return flags()

    def flags() -> list[bool]:
        return [tensor.requires_grad for tensors in leaves.values() for tensor in tensors]

    require(at_forward)
    loss = run(block, x, [weight]).square().sum()
    now = require(at_backward)
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert flags() == now
    return [tensor.grad for tensors in leaves.values() for tensor in tensors]


@pytest.mark.parametrize("way", FREEZING)
@pytest.mark.parametrize(
    "at_forward, at_backward",
    [
        ("input", "input linear norm offset argument"),
        ("input linear norm offset argument", "input"),
        ("linear norm offset argument", "linear"),
        ("linear", "norm"),
        ("linear norm", "input argument offset"),
        ("argument", "linear"),
        ("input linear", "input linear"),
    ],
)
def test_parameters_that_are_frozen_or_unfrozen_between_the_passes(
    at_forward: str, at_backward: str, way: str
) -> None:
    ours = gradients_around_a_change(FREEZING[way], at_forward, at_backward)
    plain = gradients_around_a_change(lambda block, x, more: block(x, more), at_forward, at_backward)
    assert [gradient is None for gradient in ours] == [gradient is None for gradient in plain]
    for gradient, expected in zip(ours, plain):
        assert gradient is expected or torch.equal(gradient, expected)


@pytest.mark.parametrize("way", FREEZING)
def test_flags_are_put_back_after_an_error(way: str) -> None:
    block, x, weight = Weighted(), torch.randn(5, 8, requires_grad=True), torch.randn(8)
    block.requires_grad_(False)
    loss = FREEZING[way](block, x, [weight]).sum()
    block.requires_grad_(True)
    with torch.no_grad():
        weight.add_(1)  # which autograd or the verification refuses, but for a tensor in a closure
    with contextlib.suppress(RuntimeError):
        loss.backward()
    assert all(parameter.requires_grad for parameter in block.parameters()) and not weight.requires_grad


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "CheckpointFunction"])
def test_a_block_that_is_frozen_inside_and_unfrozen_after(way: str) -> None:
    class Judged(Weighted):
        def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
            self.linear.requires_grad_(False)
            out = super().forward(x, more).sin()
            self.linear.requires_grad_(True)  # after the last saved tensor, where recomputation stops
            return out

    block, x = Judged(), torch.randn(5, 8, requires_grad=True)
    block.linear.requires_grad_(way != "CheckpointFunction")
    FREEZING[way](block, x, [torch.randn(8)]).sum().backward()
    assert all(parameter.requires_grad for parameter in block.parameters())
    assert block.linear.weight.grad is None and block.norm.weight.grad is not None
    assert x.grad is not None


def test_a_buffer_with_two_names_is_one_in_a_recomputation() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("same", self.steps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return x.sin() * self.same.clone()

    module, x = Twice(), torch.ones(2, requires_grad=True)
    checkpoint(module, x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(2).cos()) and module.same == 1
