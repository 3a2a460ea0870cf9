"""Recomputation with the state of the first pass: whatever a block reads or writes besides its arguments, gradients and buffers are
those of plain PyTorch, in both variants, in ``CheckpointFunction``, in segments and in lambdas that a loop makes anew."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from selective import drop_all
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, spectral_norm

from hvd_ckpt.recompute import (
    CheckpointFunction,
    CheckpointSequential,
    RecomputationMismatch,
    checkpoint,
)
from hvd_ckpt.recompute.tape import run_selectively

STEPS = 3


class Stateful(nn.Module):
    """A block with some state, of which ``use`` reads and writes what it likes."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.legacy_generator = np.random.RandomState(1)
        self.python_generator = random.Random(1)
        self.scale: torch.Tensor
        self.large: torch.Tensor
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("large", torch.ones(200, 200))
        self.resized: torch.Tensor
        self.register_buffer("resized", torch.empty(0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.attribute = torch.ones(())
        self.cache: torch.Tensor | None = None
        self.embedding = nn.Embedding(4, 8, max_norm=0.5)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.outer(self.use(self, torch.tanh(self.inner(x)))))


def by_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * block.scale.clone()
    block.scale.mul_(0.9).add_(0.1 * h.detach().abs().mean())
    return h


def by_buffer_written_first(block: Any, h: torch.Tensor) -> torch.Tensor:
    block.scale.mul_(0.9)
    return h * block.scale


def by_large_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * block.large[0, 0].clone()
    block.large.mul_(0.9)
    return h


def by_attribute(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * block.attribute.clone()
    block.attribute.mul_(0.9)
    return h


def by_replaced_attribute(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * block.attribute
    block.attribute = block.attribute * 0.9
    return h


def by_replaced_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * block.scale
    block.scale = block.scale * 0.9
    return h


def by_resized_buffer(block: Any, h: torch.Tensor) -> torch.Tensor:
    if not block.resized.numel():
        block.resized.resize_(8).fill_(1.0)
    h = h * block.resized.clone()
    block.resized.mul_(0.9)
    return h


def by_cache(block: Any, h: torch.Tensor) -> torch.Tensor:
    if block.cache is None:
        block.cache = torch.tanh(block.outer.weight)
    return h @ block.cache


def by_running_statistics(block: Any, h: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(h, block.mean, block.variance, training=True)


def by_weight(block: Any, h: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = h + block.embedding(torch.arange(len(h)) % 4)
    return out


def by_weight_written_first(block: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.weight.mul_(0.9)
    out: torch.Tensor = h * block.weight.detach().clone()
    return out


KINDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "torch generator": lambda block, h: h * torch.rand(h.shape, generator=block.generator),
    "numpy generator": lambda block, h: h * float(block.numpy_generator.random()),
    "legacy numpy generator": lambda block, h: h * float(block.legacy_generator.rand()),
    "python generator": lambda block, h: h * block.python_generator.random(),
    "random": lambda block, h: h * random.random(),
    "numpy.random": lambda block, h: h * float(np.random.rand()),
    "numpy's cached normal": lambda block, h: h * float(np.random.randn()),
    "buffer": by_buffer,
    "buffer, written first": by_buffer_written_first,
    "large buffer": by_large_buffer,
    "tensor attribute": by_attribute,
    "replaced attribute": by_replaced_attribute,
    "replaced buffer": by_replaced_buffer,
    "resized buffer": by_resized_buffer,
    "cache": by_cache,
    "running statistics of no batch norm": by_running_statistics,
    "weight written by max_norm": by_weight,
    "weight written first": by_weight_written_first,
    "nn.RReLU": lambda block, h: functional.rrelu(h, training=True),
}

Run = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


def in_lambdas(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for number in range(len(model)):
        x = checkpoint(lambda y, number=number: model[number](y), x)
    return x


def in_segments(use_reentrant: bool) -> Run:
    def run(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = CheckpointSequential(model, 2, use_reentrant, keep_last=False)(x)
        return out

    return run


WAYS: dict[str, Run] = {
    "segments": in_segments(False),
    "reentrant segments": in_segments(True),
    "lambdas": in_lambdas,
    "CheckpointFunction": lambda model, x: CheckpointFunction.apply(model, 1, x, *model.parameters()),
}


def trained(make: Callable[[], nn.Sequential], run: Run) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of some steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    found = {}
    for step in range(STEPS):
        loss = run(model, torch.randn(5, 8)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found[f"loss {step}"] = loss.detach()
        for block in model:
            if isinstance(block, Stateful):
                block.cache = None
    found.update(
        (name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    )
    found.update((name, tensor) for name, tensor in model.state_dict().items())
    return found


def assert_equal_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_put_back(kind: str, way: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(Stateful(KINDS[kind]) for _ in range(4)))

    plain = trained(make, lambda model, x: model(x))
    assert_equal_bits(trained(make, WAYS[way]), plain)


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


class Asking(Stateful):
    """Asks for a gradient inside its forward pass, for which a region is recomputed in the middle of its first pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_() if not x.requires_grad else x
            h = torch.tanh(self.outer(self.use(self, torch.tanh(self.inner(start)))))
            (slope,) = torch.autograd.grad(h.square().sum(), start, retain_graph=True)
        return torch.tanh(x + h + slope.detach())


@pytest.mark.parametrize("way", ["segments", "lambdas"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_put_back_in_the_middle_of_a_first_pass(kind: str, way: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), *(Asking(KINDS[kind]) for _ in range(3)))

    def run(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        return WAYS[way](model[1:], model[0](x))

    def plain(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out

    assert_equal_bits(trained(make, run), trained(make, plain))


@pytest.mark.parametrize(
    "wrap", [parametrizations.spectral_norm, spectral_norm], ids=["parametrization", "hook"]
)
@pytest.mark.parametrize("way", ["segments", "reentrant segments", "lambdas"])
def test_spectral_norm_iterates_once(wrap: Callable[[nn.Module], nn.Module], way: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh()) for _ in range(4)))

    assert_equal_bits(trained(make, WAYS[way]), trained(make, lambda model, x: model(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x[None]).view(1, len(x), 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("way", ["segments", "reentrant segments", "lambdas", "CheckpointFunction"])
def test_settings_of_the_forward_pass(way: str) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(Attention() for _ in range(4)))

    def within(run: Run) -> Run:
        def settings(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return run(model, x)

        return settings

    assert_equal_bits(trained(make, within(WAYS[way])), trained(make, within(lambda model, x: model(x))))


class NewTensors(nn.Module):
    """Makes tensors of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (torch.ones(8) / 3).to(x.dtype)


@pytest.mark.parametrize("way", ["segments", "reentrant segments", "lambdas", "CheckpointFunction"])
def test_default_dtype_of_the_forward_pass(way: str) -> None:
    def gradients(run: Run) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(NewTensors() for _ in range(4))), torch.randn(5, 8)
        torch.set_default_dtype(torch.bfloat16)
        try:
            loss = run(model, x).square().sum()
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters()]

    for ours, theirs in zip(gradients(WAYS[way]), gradients(lambda model, x: model(x))):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


# ---------------------------------------------------------------------------------------- containers


@dataclass
class Features:
    x: torch.Tensor
    others: list[Any]


class Changing(nn.Module):
    """Changes a container that it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, features: Any) -> Any:
        if self.kind == "list":
            features.append(torch.tanh(self.linear(features[-1])))
        elif self.kind == "data class":
            features.x = torch.tanh(self.linear(features.x)) + sum(features.others)
            features.others.append(features.x.mean())
        elif self.kind == "nested":
            features["deep"][0]["x"] = torch.tanh(self.linear(features["deep"][0]["x"]))
        else:
            features["x"] = torch.tanh(self.linear(features["x"]))
        return features


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda x: {"x": x}, lambda features: features["x"]),
    "list": (lambda x: [x], lambda features: features[-1]),
    "data class": (lambda x: Features(x, [1.0]), lambda features: features.x),
    "nested": (lambda x: {"deep": ({"x": x}, None)}, lambda features: features["deep"][0]["x"]),
}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_changed_containers(kind: str, use_reentrant: bool) -> None:
    make, value = CONTAINERS[kind]

    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        blocks, x = nn.ModuleList(Changing(kind) for _ in range(3)), torch.randn(5, 8, requires_grad=True)
        features = make(x)
        for block in blocks:
            features = (
                checkpoint(block, features, use_reentrant=use_reentrant) if recompute else block(features)
            )
        value(features).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in blocks.parameters())]

    for ours, theirs in zip(gradients(True), gradients(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


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
        return self.norm(torch.tanh(self.linear(x) + self.offset) * more[0].exp()) * more[0]  # type: ignore[no-any-return]


def on_a_tape(block: Weighted, x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    policy = drop_all(block, x.detach(), [more[0].detach()], keep=("linear",))
    out: torch.Tensor = run_selectively(block, (x, more), {}, policy)
    return out


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
        out: torch.Tensor = self.block(x, [self.weight])
        return out


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
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
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
        assert gradient is expected or torch.equal(gradient, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", FREEZING)
def test_flags_are_put_back_after_an_error(way: str) -> None:
    block, x, weight = Weighted(), torch.randn(5, 8, requires_grad=True), torch.randn(8)
    block.requires_grad_(False)
    loss = FREEZING[way](block, x, [weight]).sum()
    block.requires_grad_(True)
    with torch.no_grad():
        weight.add_(1)  # which autograd or the verification refuses, but for a tensor in a closure
    with contextlib.suppress(RuntimeError):
        loss.backward()  # type: ignore[no-untyped-call]
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
    FREEZING[way](block, x, [torch.randn(8)]).sum().backward()  # type: ignore[no-untyped-call]
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
