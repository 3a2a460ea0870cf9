"""Tests of selective recomputation: side effects, memory, errors of plain autograd, and calls that change tensors in place or
depend on more than their arguments; results: test_odd_blocks.py. And of masks in bits, which are restored bit for bit."""

import functools
import gc
import math

import pytest
import torch
from call_names import names_of_calls
from hypothesis import given, settings, strategies as st
from same import assert_same, gradients
from selective import checkpointed, drop_all, held, on_cpu, selectively, some
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from ways import plainly

import hvd_ckpt as hc
from hvd_ckpt.recompute.saved import compress
from hvd_ckpt.recompute.tape import Policy, Tape
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.memory import measure_peak
from hvd_ckpt.utils.torch_private import top_saved_tensors_default_hooks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_second_derivatives_retained_graphs_and_some_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6))
    x = torch.randn(3, 6, requires_grad=True)
    weights = [model[0].weight, model[4].weight]

    def derivatives(run):
        out = run(model, x)
        first = torch.autograd.grad(out.sum(), weights[1:], retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
        last = torch.autograd.grad(out.square().sum(), weights)
        (slope,) = torch.autograd.grad(run(model, x).exp().sum(), x, create_graph=True)
        return [*first, *again, *last, slope, *torch.autograd.grad(slope.square().sum(), weights)]

    assert_same(derivatives(plainly), derivatives(selectively(drop_all(model, x))))


def test_side_effects_happen_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Dropout(0.2))
    x, seen = torch.randn(2, 4, 6, 6), []
    policy = drop_all(model, x)
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    selectively(policy)(model, x).sum().backward()
    assert sorted(seen) == ["backward", "forward"] + ["gradient"] * len(list(model.parameters()))
    assert model[0].num_batches_tracked == 1
    assert torch.allclose(model[0].running_mean, 0.1 * x.mean((0, 2, 3)))


def test_memory_is_lower_and_comes_back_without_the_garbage_collector(no_collector):
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)
    model, x = nn.Sequential(*layers, nn.Linear(64, 16)), torch.randn(64, 6, 16)
    calls = names_of_calls(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train(policy, backward=True):
        out = selectively(policy)(model, x)
        if backward:
            out.square().sum().backward()

    with verifying("never"):  # which takes memory of its own
        everything = measure_peak(lambda: train(Policy(calls, frozenset())))
        cheap = frozenset(i for i, call in enumerate(calls) if call not in ("linear", "matmul"))
        assert measure_peak(lambda: train(Policy(calls, cheap))).peak_bytes < 0.9 * everything.peak_bytes
        for seed in range(12):
            policy = some(calls, seed)
            assert measure_peak(functools.partial(train, policy)).held_bytes == 0
            assert measure_peak(functools.partial(train, policy, backward=False)).held_bytes == 0


def test_groups_that_read_each_other_are_freed(no_collector):
    def cross(x, y):
        a, b = x.sin(), y.sin()
        product = b * a.cos()
        mask = product > 0
        mask.logical_not_()
        return torch.where(mask, a * product, product).square()

    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))
    for tensor in (x, y):
        tensor.grad = torch.zeros_like(tensor)
    for breaks in (range(9), (1, 2), (2, 3), ()):
        policy = drop_all(cross, x, y, keep=("logical_not_",), breaks=frozenset(breaks))
        train = functools.partial(selectively(policy), cross, x, y)
        train().sum().backward()
        assert measure_peak(lambda run=train: run().sum().backward()).held_bytes == 0


def test_code_on_another_path_keeps_everything_from_there():
    def branch(x, other):
        y = x.sin()
        y = y.exp() if other else y.cos()
        return (y * y).tanh()

    x = torch.randn(4, requires_grad=True)
    run = selectively(Policy(("sin", "cos", "mul", "tanh"), frozenset(range(4))))
    for other in (False, True):
        expected = torch.autograd.grad(branch(x, other).sum(), x)
        assert_same(torch.autograd.grad(run(branch, x, other).sum(), x), expected)


def test_without_gradients_and_after_exceptions_nothing_is_left():
    def fail(x):
        x.sin().mul(2)
        raise ValueError("on purpose")

    x = torch.randn(4, requires_grad=True)
    run = selectively(Policy(("sin", "mul"), frozenset({0, 1})))
    with pytest.raises(ValueError, match="on purpose"):
        run(fail, x)
    assert not any(isinstance(m, Tape) for m in torch.overrides._get_current_function_mode_stack())
    assert top_saved_tensors_default_hooks(False) is None
    with torch.no_grad():
        assert not run(lambda y: y.sin() * 2, x).requires_grad


def test_statistics_that_a_frozen_norm_reads_may_not_change_before_the_backward_pass():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).eval()
    x = torch.randn(3, 6)
    out = selectively(drop_all(model, x))(model, x)
    model[1].running_mean.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("around", [plainly, on_cpu])
@pytest.mark.parametrize("kept", [(), ("mul", "gelu")], ids=["argument", "saved"])
def test_kept_tensor_changed_in_place_is_an_error(around, kept):
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def function(y):
        return F.gelu(y * 2) @ weight

    policy = drop_all(function, x, keep=kept, compress=True)
    out = around(functools.partial(selectively(policy), function), x)
    with torch.no_grad():
        (weight if around is plainly else out).mul_(2)
    if around is plainly:
        with pytest.raises(RuntimeError, match="'matmul' needs.*modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()  # nobody needs the result


@pytest.mark.parametrize("around", [plainly, on_cpu, checkpointed])
def test_tensor_changed_after_it_was_saved_never_gives_a_wrong_gradient(around):
    def spoil(x):
        y = x.sin()
        z = y * y
        y.add_(1)
        return z + y.cos()

    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((x.sin() ** 2 + (x.sin() + 1).cos()).sum(), x)[0]
    errors = 0
    for keep in ((), ("sin",), ("mul",), ("add_",), ("sin", "mul"), ("sin", "cos")):
        out = around(functools.partial(selectively(drop_all(spoil, x, keep=keep)), spoil), x)
        try:
            torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
        except RuntimeError as error:
            errors += "modified by an inplace operation" in str(error)
    assert errors


def test_two_forward_passes_of_a_block_that_writes_buffers_before_a_backward_pass():
    def outcome(run):
        torch.manual_seed(0)
        block = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
        x = torch.randn(4, 8)
        one, two = (run(drop_all(block, x))(block, y) for y in (x, x * 2))
        (one * two).sum().backward()
        return gradients(block)

    assert_same(outcome(selectively), outcome(lambda policy: plainly))


def dual(run, x):
    with torch.autograd.forward_ad.dual_level():
        return run(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("recomputing", ["plan", "region"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda run, x: torch.func.jvp(run, (x,), (torch.ones_like(x),)),
        lambda run, x: torch.func.vmap(run)(x),
        lambda run, x: torch.func.vjp(run, x),
        dual,
    ],
    ids=["jvp", "vmap", "vjp", "dual"],
)
def test_transforms_are_refused_in_the_forward_pass(transform, recomputing):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Tanh()), torch.randn(4, 4)
    way = selectively(drop_all(block, x)) if recomputing == "plan" else hc.checkpoint
    run = functools.partial(way, block)
    with pytest.raises(RuntimeError, match=r"recomputed.*hc\.without_recomputation"):
        transform(run, x)
    with hc.without_recomputation():
        transform(run, x)
    with torch.autograd.forward_ad.dual_level():
        run(x).sum().backward()  # other tensors are not refused


# ---------------------------------------------------------------------------------------- random numbers


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x):
        queries, keys, values = self.inner(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(queries, keys, values, dropout_p=0.3)
        return F.alpha_dropout(F.dropout(y, 0.2), 0.2)


class Draws(TorchDispatchMode):
    """Counts the elements that are drawn, in every mode and pass."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if func is torch.ops.aten.bernoulli_.float else 0
        return result


@pytest.mark.parametrize("redraw", [False, True])
def test_masks_of_dropped_calls_are_drawn_once_or_again(redraw):
    model, x = Attention(), torch.randn(2, 64, 8, requires_grad=True)

    def outcome(run):
        torch.manual_seed(1)
        with Draws() as draws:
            y = run(model, x)
            forward = draws.elements
            slopes = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        return [y.detach(), *slopes, torch.rand(3)], (forward, draws.elements - forward)

    expected, (forward, backward) = outcome(plainly)
    found, drawn = outcome(selectively(drop_all(model, x, redraw=redraw)))
    assert_same(found, expected)
    assert forward > 0 == backward and drawn == (forward, forward if redraw else 0)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_mask_that_is_drawn_into_a_new_tensor_within_a_region(mode):
    """As stochastic depth draws it: nothing of the region was unpacked before the mask."""

    def block(x):
        return x.sin() * torch.empty(x.shape).bernoulli_(0.5).div_(0.5)

    def outcome(run):
        torch.manual_seed(1)
        y = run(block, x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), x), torch.rand(3)]

    x = torch.randn(64, 40, requires_grad=True)
    way = selectively(drop_all(block, x, keep=("sin", "mul")))
    with verifying(mode):
        assert_same(outcome(functools.partial(hc.checkpoint, way)), outcome(plainly))


def test_masks_in_bits_take_a_bit_of_memory_for_each_element():
    def block(x):
        return F.dropout(x, 0.2)

    x = torch.randn(1000, 1000, requires_grad=True)
    drawn_again, in_bits = (
        held(functools.partial(selectively(drop_all(block, x, redraw=redraw)), block), x)
        for redraw in (True, False)
    )
    assert abs(in_bits - drawn_again - x.numel() // 8) < 10_000


# ---------------------------------------------------------------------------------------- tensors in bits


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left, right):
    assert (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device)
    bits = BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def check(tensor, fits=True):
    """Restored bit for bit, twice, from a bit for each element; refused if it does not fit."""
    before, compressed = tensor.clone(), compress(tensor)
    assert same_bits(tensor, before)
    if not fits:
        assert compressed is None
        return
    assert compressed.payload.nbytes == -(-tensor.numel() // 8) < tensor.nbytes
    assert compressed.dtype == tensor.dtype
    for restored in (compressed.get(), compressed.get()):
        assert same_bits(restored, tensor)
        assert not restored.requires_grad
        restored.zero_()  # its own memory: the next is not affected
    assert same_bits(tensor, before)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from((torch.bool, *FLOATS, *INTEGERS)),
    generator=st.integers(0, 1000).map(torch.Generator().manual_seed),
    keep=st.floats(0, 1),
    odd=st.sampled_from([None, -0.0, math.nan, math.inf, 5e-324, 1.0]),
)
def test_zero_and_one_other_value_become_bits(shape, dtype, generator, keep, odd):
    mask = torch.rand(shape, generator=generator) < keep
    scaled = mask.to(dtype) * torch.tensor(1 / 0.9 if dtype.is_floating_point else 3).to(dtype)
    if odd is not None and dtype.is_floating_point and scaled.numel():
        scaled.view(-1)[torch.randint(scaled.numel(), (), generator=generator)] = odd
    values = set(scaled.view(BITS[dtype.itemsize]).view(-1).tolist()) - {0}
    check(scaled, len(values) < 2 and -(-scaled.numel() // 8) < scaled.nbytes)


@pytest.mark.parametrize("size", [100_001, 32_768, 3 * 32_768 + 5])
def test_a_misfit_that_no_sample_meets_is_found(size):
    noise = F.dropout(torch.ones(size), 0.1)
    check(noise)
    for odd in (-0.0, math.nan, 1.0):
        for place in (size - 2, size // 2 + 1):
            changed = noise.clone()
            changed[place] = odd
            check(changed, False)


def test_a_nan_that_says_something():
    check(torch.tensor([0, 0x7FC12345] * 8, dtype=torch.int32).view(torch.float32))


def test_what_was_saved_by_dropout_itself_fits():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(compress(one)), lambda _: None):
        F.dropout(torch.randn(64, 64, requires_grad=True), 0.1)
    assert any(compressed is not None and compressed.payload.nbytes == 512 for compressed in saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[3:17, 2:9],
        lambda t: t[::3, 1::2],
        lambda t: t.view(4, 5, 3, 8).to(memory_format=torch.channels_last),
        lambda t: t.view(4, 5, 3, 8).permute(2, 0, 3, 1),
        lambda t: t[5],
        lambda t: t.flatten()[7:],
        lambda t: t[:, :1].expand(20, 24),
    ],
)
def test_views_and_strides(change):
    tensor = change(F.dropout(torch.ones(20, 24), 0.5))
    restored = compress(tensor).get()
    assert same_bits(restored, tensor)
    dense = tensor.clone().stride() == tensor.stride()
    assert restored.stride() == tensor.stride() if dense else restored.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1).expand(64, 1),  # four bytes; one bit per element would be eight
        torch.empty(0, 5),
        torch.tensor(True),
        torch.ones(8, 8).to_sparse(),
        torch.ones(8, 8, dtype=torch.complex64),
        torch.ones(8, 8, device="meta"),
        torch.ones(8, 8).as_subclass(type("Special", (torch.Tensor,), {})),
    ],
)
def test_others_are_left_alone(tensor):
    assert compress(tensor) is None
