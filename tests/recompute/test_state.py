"""Recomputation with the state of the first pass: containers, shared tensors, and what is frozen or unfrozen between the passes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from same import assert_same
from selective import drop_all
from torch import Tensor, nn
from ways import VARIANTS, WAYS, Run, plainly, reentrant

from hvd_ckpt.recompute import RecomputationMismatch, checkpoint
from hvd_ckpt.recompute.tape import run_selectively


@VARIANTS
def test_a_first_write_of_another_modules_weight_is_an_error(run: Run) -> None:
    layer = nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.weight.mul_(0.9)
        return torch.tanh(layer(x))

    y = run(function, torch.randn(4, 8, requires_grad=True))
    with pytest.raises(
        RecomputationMismatch, match="'Linear.weight' was written .* from before are not known"
    ):
        y.sum().backward()


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "lambda", "nested", "segments"])
def test_tensors_in_the_places_of_parameters_and_buffers(way: str) -> None:
    def trained(run: Run) -> list[Tensor | None]:
        torch.manual_seed(0)
        norm, layer, gradients = nn.BatchNorm1d(8), nn.Linear(8, 8), []
        model = Through(run, nn.Sequential(layer, nn.Tanh(), norm, nn.Tanh()))
        for number in range(3):  # the values are other ones from the second on
            state = {name: value.detach() + number for name, value in model.state_dict().items()}
            for name, _ in model.named_parameters():
                state[name].requires_grad_()
            y = torch.func.functional_call(model, state, (torch.randn(4, 8),))
            y.square().sum().backward()
            gradients += [value.grad for value in state.values()]
            gradients += [value for name, value in state.items() if "running" in name]
            assert norm.num_batches_tracked == 0 and layer.weight.grad is None
        return gradients

    assert_same(trained(WAYS[way]), trained(plainly))


@pytest.mark.parametrize(
    "run", [reentrant, lambda block, x: block[2](checkpoint(lambda y: block[1](block[0](y)), x))]
)
def test_a_scripted_module_within_reach(run: Run) -> None:
    def trained(run: Run) -> list[Tensor | None]:
        torch.manual_seed(0)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)))
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), scripted)
        for _ in range(4):
            run(block, torch.randn(4, 8)).square().sum().backward()
        return [*(parameter.grad for parameter in block.parameters()), *block.buffers()]

    assert_same(trained(run), trained(plainly), 1e-4)  # it has other bits once it is optimized


class Through(nn.Module):
    def __init__(self, run: Run, block: nn.Module) -> None:
        super().__init__()
        self.run, self.block = run, block

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


# ---------------------------------------------------------------------------------------- containers


def test_tensors_in_containers_are_watched_like_others() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(5, 8)
    y = checkpoint(lambda features: linear(features["x"]).tanh(), {"x": x})
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@VARIANTS
def test_a_tensor_that_is_given_twice_is_one_tensor_again(run: Run) -> None:
    same = []
    linear, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)

    def function(first: Tensor, rest: dict[str, Tensor]) -> Tensor:
        same.append(first is rest["again"])
        return torch.tanh(linear(first) * rest["again"]).sin()

    run(function, x, {"again": x}).sum().backward()
    assert same == [True, True]


class Cache:
    """An object that blocks write to."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.calls = 0

    def update(self, x: Tensor) -> Tensor:
        self.states.append(x)
        self.calls += 1
        return torch.stack(self.states).sum(0)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return torch.tanh(self.linear(cache.update(torch.sin(x))))


@VARIANTS
def test_an_object_that_holds_tensors(run: Run) -> None:
    def gradients(run: Run) -> list[Tensor | None]:
        torch.manual_seed(0)
        blocks, x = nn.ModuleList(Caching() for _ in range(3)), torch.randn(5, 8, requires_grad=True)
        cache, y = Cache(), x
        for block in blocks:
            y = run(block, y, cache)
        y.square().sum().backward()
        assert cache.calls == 3 and len(cache.states) == 3
        return [x.grad, *(parameter.grad for parameter in blocks.parameters())]

    if run is reentrant:  # what the first pass has stored has no graph
        with pytest.raises(RuntimeError, match="without returning it"):
            gradients(run)
    else:
        assert_same(gradients(run), gradients(plainly))


def test_reentrant_gradients_of_inputs_keep_their_strides() -> None:
    def gradient(run: Run) -> tuple[int, ...]:
        strides: list[tuple[int, ...]] = []
        x = torch.randn(2, 3, 4, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: strides.append(grad.stride()))

        def function(h: Tensor) -> Tensor:
            return torch.tanh(h.transpose(1, 2).contiguous())

        run(function, y).square().sum().backward()
        return strides[0]

    assert gradient(reentrant) == gradient(plainly)


class Weighted(nn.Module):
    """A layer with a buffer and an argument in a container, whose gradients can be asked for like those of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.offset: Tensor
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        return self.norm(torch.tanh(self.linear(x) + self.offset) * more[0].exp()) * more[0]


def on_a_tape(block: Weighted, x: Tensor, more: list[Tensor]) -> Tensor:
    policy = drop_all(block, x.detach(), [more[0].detach()], keep=("linear",))
    return run_selectively(block, (x, more), {}, policy)


FREEZING: dict[str, Run] = {
    **{name: WAYS[name] for name in ("non-reentrant", "reentrant", "nested")},
    "no early stop": lambda block, x, more: checkpoint(block, x, more, early_stop=False),
    "lambda": lambda block, x, more: checkpoint(lambda y: block(y, more), x),
    "reentrant lambda": lambda block, x, more: reentrant(lambda y: block(y, more), x),
    "segments": lambda block, x, more: WAYS["segments"](Partial(block, more), x),
    "reentrant segments": lambda block, x, more: WAYS["reentrant segments"](Partial(block, more), x),
    "tape": on_a_tape,
}


class Partial(nn.Module):
    """A block with an attribute as its other argument."""

    def __init__(self, block: Weighted, more: list[Tensor]) -> None:
        super().__init__()
        self.block, self.weight = block, more[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, [self.weight])


def gradients_around_a_change(run: Run, at_forward: str, at_backward: str) -> list[Tensor | None]:
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
    plain = gradients_around_a_change(plainly, at_forward, at_backward)
    assert_same(ours, plain)


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


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant"])
def test_a_block_that_is_frozen_inside_and_unfrozen_after(way: str) -> None:
    class Judged(Weighted):
        def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
            self.linear.requires_grad_(False)
            out = super().forward(x, more).sin()
            self.linear.requires_grad_(True)  # after the last saved tensor, where recomputation stops
            return out

    block, x = Judged(), torch.randn(5, 8, requires_grad=True)
    FREEZING[way](block, x, [torch.randn(8)]).sum().backward()
    assert all(parameter.requires_grad for parameter in block.parameters())
    assert block.linear.weight.grad is None and block.norm.weight.grad is not None
    assert x.grad is not None


class Shifted(nn.Module):
    """Adds a buffer, which others write, or which it writes past the version counter after some passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.passes = 0

    def forward(self, x):
        y = (x + self.shift).exp()
        if self.passes > 1:
            self.shift.data.mul_(0.5).add_(x.detach().mean(0))
        return y


@pytest.mark.parametrize("norm", [False, True])
def test_a_buffer_that_is_written_after_the_first_pass_has_its_earlier_values(norm):
    module = nn.BatchNorm1d(4).eval() if norm else Shifted()
    x = torch.randn(3, 4).requires_grad_()
    expected = torch.autograd.grad(module(x).sum(), x)
    checkpoint(module, x).sum().backward()  # verified
    y = checkpoint(module, x).sum()
    if norm:
        module.train()
        module(2 * x)
    else:
        module.shift.add_(1)
    now = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert_same(torch.autograd.grad(y, x), expected)
    assert_same(dict(module.named_buffers()), now)


def test_a_buffer_that_later_passes_write_past_its_version_counter():
    def outcome(run):
        torch.manual_seed(0)
        module, losses = Shifted(), []
        x = torch.randn(3, 4).requires_grad_()
        for module.passes in range(5):
            losses.append(run(module, x).sum())
            losses[-1].backward()
        return [x.grad, module.shift, *(loss.detach() for loss in losses)]

    assert_same(outcome(checkpoint), outcome(lambda module, x: module(x)))
