"""Tests of selective recomputation: side effects, memory, errors of plain autograd, and calls that change tensors in place or
depend on more than their arguments; results: test_odd_blocks.py."""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from call_names import names_of_calls
from same import assert_same
from selective import checkpointed, drop_all, held, on_cpu, selectively, some
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_ckpt as hc
from hvd_ckpt.recompute.tape import Policy, Tape, run_selectively
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.memory import measure_peak
from hvd_ckpt.utils.torch_private import top_saved_tensors_default_hooks

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_second_derivatives_retained_graphs_and_some_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6))
    x = torch.randn(3, 6, requires_grad=True)
    policy = drop_all(model, x)
    weights = [model[0].weight, model[4].weight]

    def derivatives(run: Callable[[], Tensor]) -> list[Tensor]:
        out = run()
        first = torch.autograd.grad(out.sum(), weights[1:], retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
        last = torch.autograd.grad(out.square().sum(), weights)
        (slope,) = torch.autograd.grad(run().exp().sum(), x, create_graph=True)
        return [*first, *again, *last, slope, *torch.autograd.grad(slope.square().sum(), weights)]

    assert_same(derivatives(lambda: model(x)), derivatives(lambda: run_selectively(model, (x,), {}, policy)))


def test_side_effects_happen_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Dropout(0.2))
    x = torch.randn(2, 4, 6, 6)
    policy = drop_all(model, x)
    seen: list[str] = []
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    run_selectively(model, (x,), {}, policy).sum().backward()
    assert sorted(seen) == ["backward", "forward"] + ["gradient"] * len(list(model.parameters()))
    assert model[0].num_batches_tracked == 1
    assert torch.allclose(model[0].running_mean, 0.1 * x.mean((0, 2, 3)))


def test_statistics_that_a_frozen_norm_reads_may_not_change_before_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).eval()
    x = torch.randn(3, 6)
    policy = drop_all(model, x)
    out = run_selectively(model, (x,), {}, policy)
    model[1].running_mean.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_model_called_twice_before_backward_and_keyword_tensors() -> None:
    def attend(x: Tensor, *, scale: Tensor, masks: dict[str, Tensor]) -> Tensor:
        return torch.where(masks["keep"], (x * scale).exp(), x.sin()) * scale

    x, scale = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    masks = {"keep": torch.randn(4, 4) > 0}
    policy = Policy(("mul", "exp", "sin", "where", "mul"), frozenset(range(5)))

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Any]:
        one, two = run(x), run(x * 2)
        return list(torch.autograd.grad((one * two).sum(), [x, scale]))

    kwargs = {"scale": scale, "masks": masks}
    expected = gradients(lambda y: attend(y, **kwargs))
    assert_same(expected, gradients(lambda y: run_selectively(attend, (y,), kwargs, policy)))


def test_memory_is_lower_and_comes_back_without_the_garbage_collector() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)
    model, x = nn.Sequential(*layers, nn.Linear(64, 16)), torch.randn(64, 6, 16)
    calls = names_of_calls(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train(policy: Policy, backward: bool = True) -> None:
        out = run_selectively(model, (x,), {}, policy)
        if backward:
            out.square().sum().backward()

    with no_collector(), verifying("never"):  # which takes memory of its own
        everything = measure_peak(lambda: train(Policy(calls, frozenset())))
        cheap = frozenset(i for i, call in enumerate(calls) if call not in ("linear", "matmul"))
        assert measure_peak(lambda: train(Policy(calls, cheap))).peak_bytes < 0.9 * everything.peak_bytes
        for seed in range(12):
            policy = some(calls, seed)
            assert measure_peak(functools.partial(train, policy)).held_bytes == 0
            assert measure_peak(functools.partial(train, policy, backward=False)).held_bytes == 0


def test_groups_that_read_each_other_are_freed() -> None:
    def cross(x: Tensor, y: Tensor) -> Tensor:
        a, b = x.sin(), y.sin()
        product = b * a.cos()
        mask = product > 0
        mask.logical_not_()
        return torch.where(mask, a * product, product).square()

    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))
    for tensor in (x, y):
        tensor.grad = torch.zeros_like(tensor)
    with no_collector():
        for breaks in (range(9), (1, 2), (2, 3), ()):
            policy = drop_all(cross, x, y, keep=("logical_not_",), breaks=frozenset(breaks))
            train = functools.partial(selectively(policy), cross, x, y)
            train().sum().backward()
            assert measure_peak(lambda run=train: run().sum().backward()).held_bytes == 0


def test_code_on_another_path_keeps_everything_from_there() -> None:
    def branch(x: Tensor, other: bool) -> Tensor:
        y = x.sin()
        y = y.exp() if other else y.cos()
        return (y * y).tanh()

    x = torch.randn(4, requires_grad=True)
    policy = Policy(("sin", "cos", "mul", "tanh"), frozenset(range(4)))
    for other in (False, True):
        out = run_selectively(branch, (x, other), {}, policy)
        expected = torch.autograd.grad(branch(x, other).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_without_gradients_and_after_exceptions_nothing_is_left() -> None:
    def fail(x: Tensor) -> Tensor:
        x.sin().mul(2)
        raise ValueError("on purpose")

    x = torch.randn(4, requires_grad=True)
    policy = Policy(("sin", "mul"), frozenset({0, 1}))
    with pytest.raises(ValueError, match="on purpose"):
        run_selectively(fail, (x,), {}, policy)
    assert not any(isinstance(m, Tape) for m in torch.overrides._get_current_function_mode_stack())
    assert top_saved_tensors_default_hooks(False) is None
    with torch.no_grad():
        assert not run_selectively(lambda y: y.sin() * 2, (x,), {}, policy).requires_grad


def under_no_hooks(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


@pytest.mark.parametrize("around", [under_no_hooks, on_cpu])
@pytest.mark.parametrize("kept", [(), ("mul", "gelu")], ids=["argument", "saved"])
def test_kept_tensor_changed_in_place_is_an_error(
    around: Callable[..., Tensor], kept: tuple[str, ...]
) -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def function(y: Tensor) -> Tensor:
        return F.gelu(y * 2) @ weight

    policy = drop_all(function, x, keep=kept, compress=True)
    out = around(lambda y: run_selectively(function, (y,), {}, policy), x)
    changed = weight if around is under_no_hooks else out
    with torch.no_grad():
        changed.mul_(2)
    if around is under_no_hooks:
        with pytest.raises(RuntimeError, match="'matmul' needs.*modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()  # nobody needs the result


@pytest.mark.parametrize("around", [under_no_hooks, on_cpu, checkpointed])
def test_tensor_changed_after_it_was_saved_never_gives_a_wrong_gradient(
    around: Callable[..., Tensor],
) -> None:
    def spoil(x: Tensor) -> Tensor:
        y = x.sin()
        z = y * y
        y.add_(1)
        return z + y.cos()

    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sin() ** 2 + (x.sin() + 1).cos()).sum(), x)[0]
    errors = 0
    for keep in ((), ("sin",), ("mul",), ("add_",), ("sin", "mul"), ("sin", "cos")):
        policy = drop_all(spoil, x, keep=keep)
        out = around(functools.partial(selectively(policy), spoil), x)
        try:
            torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
        except RuntimeError as error:
            errors += "modified by an inplace operation" in str(error)
    assert errors


TRANSFORMS = {
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (torch.ones_like(x),)),
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "vjp": lambda run, x: torch.func.vjp(run, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("planned", [True, False])
def test_transforms_are_refused_in_the_forward_pass(transform: Callable[..., object], planned: bool) -> None:
    linear = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        return F.gelu(linear(x)).sin()

    x = torch.randn(4, 4)
    policy = drop_all(block, x)
    run = (
        functools.partial(selectively(policy), block) if planned else functools.partial(hc.checkpoint, block)
    )
    with pytest.raises(RuntimeError, match=r"recomputed.*hc\.without_recomputation"):
        transform(run, x)
    with hc.without_recomputation():
        transform(run, x)


def test_dual_tensors_are_refused_and_others_are_not() -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def block(y: Tensor) -> Tensor:
        return F.gelu(y @ weight).sin()

    policy = drop_all(block, x)
    with torch.autograd.forward_ad.dual_level():
        run_selectively(block, (x,), {}, policy).sum().backward()
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"hc\.without_recomputation"):
            run_selectively(block, (dual,), {}, policy)


def test_two_forward_passes_of_a_block_that_writes_buffers_before_a_backward_pass() -> None:
    def gradients(recompute: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
        calls = names_of_calls(copy.deepcopy(block), torch.randn(4, 8))
        policy = Policy(calls, frozenset(range(len(calls))))
        losses = []
        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            losses.append(
                (run_selectively(block, (x,), {}, policy) if recompute else block(x)).square().sum()
            )
        (losses[0] - losses[1]).backward()
        return [parameter.grad for parameter in block.parameters()]

    for ours, theirs in zip(gradients(True), gradients(False)):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inner(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(queries, keys, values, dropout_p=0.3)
        return F.alpha_dropout(F.dropout(y, 0.2), 0.2)


class Draws(TorchDispatchMode):
    """Counts the elements that are drawn, in every mode and pass."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if func is torch.ops.aten.bernoulli_.float else 0
        return result


@pytest.mark.parametrize("redraw", [False, True])
def test_masks_of_dropped_calls_are_drawn_once_or_again(redraw: bool) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 64, 8)
    policy = drop_all(model, x, redraw=redraw)

    def outcome(run: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        with Draws() as draws:
            y = run(x)
            forward = draws.elements
            y.square().sum().backward()
        drawn = [forward, draws.elements - forward]
        return [y.detach(), *(parameter.grad for parameter in model.parameters()), torch.rand(3)], drawn

    expected, (forward, backward) = outcome(model)
    seen, drawn = outcome(lambda x: run_selectively(model, (x,), {}, policy))
    assert_same(seen, expected)
    assert forward > 0 == backward and drawn == [forward, forward if redraw else 0]


def test_masks_in_bits_take_a_bit_of_memory_for_each_element() -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x, 0.2)

    x = torch.randn(1000, 1000, requires_grad=True)
    drawn_again, in_bits = (
        held(functools.partial(selectively(drop_all(block, x, redraw=redraw)), block), x)
        for redraw in (True, False)
    )
    assert abs(in_bits - drawn_again - x.numel() // 8) < 10_000


def test_a_mask_that_is_drawn_into_a_new_tensor_within_a_region() -> None:
    """As stochastic depth draws it: nothing of the region was unpacked before the mask."""

    def block(x: Tensor) -> Tensor:
        noise = torch.empty(x.shape).bernoulli_(0.5)
        return x.sin() * noise.div_(0.5)

    def outcome(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(2)).requires_grad_()
        torch.manual_seed(1)
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), torch.rand(3)]

    policy = drop_all(block, torch.randn(64, 40), keep=("sin", "mul"))
    for mode in ("always", "never"):
        with verifying(mode):
            seen = outcome(lambda x: hc.checkpoint(lambda x: run_selectively(block, (x,), {}, policy), x))
            assert_same(seen, outcome(block))


@pytest.fixture
def drawing_operator() -> Iterator[Callable[[Tensor], Tensor]]:
    """A custom operator whose decomposition draws no random numbers of PyTorch."""
    library = torch.library.Library("hvd_ckpt_test", "FRAGMENT")
    tags = (torch.Tag.nondeterministic_seeded,)
    library.define("scaled(Tensor x) -> Tensor", tags=tags)
    library.impl("scaled", lambda x: x.sin() * random.random(), "CompositeImplicitAutograd")
    yield torch.ops.hvd_ckpt_test.scaled
    library._destroy()


def test_a_custom_operator_draws_the_same_numbers_of_python_again(drawing_operator: Any) -> None:
    def block(x: Tensor) -> Tensor:
        return drawing_operator(x).exp() * 2

    def outcome(run: Callable[[Tensor], Tensor]) -> list[Any]:
        x = torch.arange(6.0).requires_grad_()
        random.seed(1)
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), random.random()]

    policy = drop_all(block, torch.arange(6.0))
    with verifying("never"):
        assert_same(outcome(lambda x: run_selectively(block, (x,), {}, policy)), outcome(block))


@pytest.mark.parametrize("function", [F.rrelu, F.gumbel_softmax, torch.bernoulli, torch.normal])
def test_other_random_numbers_of_dropped_calls_are_drawn_again(function: Callable[..., Tensor]) -> None:
    def block(x: Tensor) -> Tensor:
        if function is F.rrelu:
            return F.rrelu(x, training=True) * x
        if function is torch.normal:
            return torch.normal(x.sigmoid(), x.sigmoid()) * x
        return function(x.sigmoid()) * x

    x = torch.randn(64, 8, requires_grad=True)

    def outcome(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), torch.rand(3)]

    policy = drop_all(block, x)
    assert_same(outcome(lambda x: run_selectively(block, (x,), {}, policy)), outcome(block))


class Reads(nn.Module):
    """Its calls are given values in which a tape does not see tensors, and which change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.order = np.arange(8)
        self.register_buffer("crop", torch.tensor([0, 4]))
        self.edges = array.array("i", [0, 4])

    def of_array(self, h: Tensor) -> Tensor:
        return h[:, self.order]

    def of_slice(self, h: Tensor) -> Tensor:
        return h[:, self.crop[0] : self.crop[1]]

    def of_function(self, h: Tensor) -> Tensor:
        self.calls = 0

        def distance(one: Tensor, other: Tensor) -> Tensor:
            self.calls += 1
            return (one - other).square().sum(-1)

        loss = F.triplet_margin_with_distance_loss(h, h.sin(), h.cos(), distance_function=distance)
        return h.exp() * loss

    def change(self) -> None:
        np.random.default_rng(len(self.edges)).shuffle(self.order)
        self.crop += 4

    def forward(self, x: Tensor, way: str) -> Tensor:
        h = getattr(self, way)(self.inner(x).tanh())
        return F.gelu(h) * h.sigmoid()


@pytest.mark.parametrize("way", ["of_array", "of_slice", "of_function"])
def test_what_a_tape_does_not_know_is_kept(way: str) -> None:
    x = torch.randn(16, 8)

    def outcome(policy: Policy | None) -> list[Any]:
        torch.manual_seed(1)
        model = Reads()
        run = model if policy is None else lambda *args: run_selectively(model, args, {}, policy)
        one = run(x, way)
        calls = getattr(model, "calls", 0)
        if way != "of_function":
            model.change()
        (one.square().sum() + run(x, way).square().sum()).backward()
        return [*(parameter.grad for parameter in model.parameters()), calls, getattr(model, "calls", 0)]

    policy = drop_all(Reads(), x, way)
    with verifying("never"):
        assert_same(outcome(policy), outcome(None))


def test_views_of_one_memory_that_read_it_differently_are_told_apart() -> None:
    """A conjugate, and a negated view, under the hooks of an outer region."""

    def block(x: Tensor) -> Tensor:
        f = torch.fft.rfft(x.sin())
        return (f * f.conj()).real.sqrt() * (f.imag * f.conj().imag).exp()

    x = torch.randn(8, 16).requires_grad_()
    expected = torch.autograd.grad(block(x).sum(), x)
    calls = names_of_calls(block, x)
    for seed in range(4):
        policy = some(calls, seed)
        for around in (under_no_hooks, on_cpu, checkpointed):
            y = around(functools.partial(selectively(policy), block), x)
            assert_same(torch.autograd.grad(y.sum(), x), expected)
