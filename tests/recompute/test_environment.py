"""Recomputation in the environment of the first pass: modes, context variables and settings that begin or end between passes are
those of the first pass, in every way of recomputing, and an environment of another kind is verified anew."""

import contextlib
import contextvars
import copy
import functools
import itertools
import threading

import pytest
import torch
from odd_blocks import POLICIES, WIDTH, Block, step
from same import assert_same, gradients
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from ways import CHAINS, EVERY_KIND, plainly

import hvd_ckpt as hc
from hvd_ckpt.planning.policy import CheckpointPolicy, apply_policy
from hvd_ckpt.recompute.verify import verifying

FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


class Scaling(TorchFunctionMode):
    """Scales each tanh while it is entered, and counts those that it has seen since then."""

    def __init__(self, factor=0.5):
        super().__init__()
        self.factor, self.entered, self.seen = factor, False, 0

    def __enter__(self):
        self.entered, self.seen = True, 0
        return super().__enter__()

    def __exit__(self, *error):
        self.entered = False
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.tanh or not self.entered:
            return out
        self.seen += 1
        return out * self.factor


class ScalingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


@contextlib.contextmanager
def variable(value=0.5):
    token = FACTOR.set(value)
    try:
        yield
    finally:
        FACTOR.reset(token)


@contextlib.contextmanager
def setting(change, inside, outside):
    change(inside)
    try:
        yield
    finally:
        change(outside)


@contextlib.contextmanager
def two_modes():
    with Scaling(), ScalingOperations(), Scaling(0.25), variable():
        yield


ENVIRONMENTS = {
    "function mode": Scaling,
    "dispatch mode": ScalingOperations,
    "modes in modes": two_modes,
    "context variable": variable,
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "library": lambda: torch.backends.mkldnn.flags(enabled=False),
}


WAYS = {**CHAINS, **POLICIES}


def depends(block, x):
    """The middle of a block; its result depends on all of :data:`ENVIRONMENTS`."""
    made = torch.empty(1)
    factor = FACTOR.get() * (0.5 if made.device.type == "meta" else 1.0)
    factor *= (1.5 if made.itemsize == 8 else 1) * (1.0 if torch.backends.mkldnn.enabled else 0.7)
    factor *= 1.0 if torch.backends.cuda.flash_sdp_enabled() else 0.9
    return torch.tanh(block.b(torch.tanh(x) * factor)).float()


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(depends) for _ in range(4)))


def trained(run, **options):
    return step(chain(), torch.randn(3, WIDTH), run, **options)


def in_some(name, steps, function):
    """A function, some of whose calls are in an environment."""
    calls = itertools.count()

    def call(*args):
        with ENVIRONMENTS[name]() if next(calls) in steps else contextlib.nullcontext():
            return function(*args)

    return call


@functools.cache
def plainly_trained(name=None, steps=()):
    return trained(in_some(name, steps, plainly), steps=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_of_some_forward_passes(name, way):
    for steps in ((0, 1, 2), (1, 2), (0, 2)):
        ours = trained(in_some(name, steps, WAYS[way]), steps=3)
        assert_same(ours, plainly_trained(name, steps), 1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["function mode", "dispatch mode", "context variable", "default device", "device"]
)
def test_an_environment_of_backward_passes_alone(name, way):
    ours = trained(WAYS[way], backward=in_some(name, (1, 2), torch.Tensor.backward), steps=3)
    assert_same(ours, plainly_trained(), 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_an_environment_of_two_of_three_calls_and_backward_passes_on_other_threads(way):
    def thrice(run, model, x):
        x = run(model, x)
        with two_modes():  # both in one context, which is recomputed on another thread
            return run(model, x), run(model, 2 * x)

    def on_a_thread(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    def train(run):
        return trained(functools.partial(thrice, run), backward=on_a_thread)

    assert_same(train(WAYS[way]), train(plainly), 1e-5)


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "segments", "policy 0"])
def test_a_mode_that_is_still_entered_is_not_entered_again(way):
    def train(run):
        model = chain()
        with Scaling() as mode:
            out = run(model, torch.randn(3, WIDTH))
            with Scaling(0.1):  # of the backward pass alone
                out.square().mean().backward()
            assert mode.entered
        return gradients(model), mode.seen

    (ours, seen), (plain, plainly_seen) = train(WAYS[way]), train(plainly)
    assert_same(ours, plain, 1e-5)
    assert (
        seen > plainly_seen == 8
    )  # those of the recomputation come on top, as under the mode of a whole step


def test_contexts_of_context_fn_are_added_to_the_environment():
    seen, x = [], torch.randn(3).requires_grad_()

    def block(x):
        seen.append((FACTOR.get(), len(torch.overrides._get_current_function_mode_stack())))
        return torch.tanh(x).tanh()

    with verifying("never"):
        with Scaling(), variable(2.0):
            out = hc.checkpoint(block, x, context_fn=lambda: (variable(1.0), two_modes()))
        out.sum().backward()
    assert seen == [(1.0, 1), (0.5, 3)]


def test_a_counter_counts_what_runs_while_it_is_entered():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4).requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = hc.checkpoint(lambda y: torch.tanh(layer(y)), x)
    once = forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == once > 0
    assert backward.get_total_flops() == 3 * once  # the recomputation and two gradients


@EVERY_KIND
def test_after_an_error_all_is_as_before(run):
    """Flags of the passes, modes, variables, buffers, and which parameters require gradients."""
    norm, broken, x = nn.BatchNorm1d(4).requires_grad_(False), [True], torch.randn(3, 4).requires_grad_()

    def function(x):
        y = norm(torch.tanh(x))
        if broken:
            raise KeyError("broken")
        return torch.tanh(y).tanh()

    with pytest.raises(KeyError, match="broken"):
        run(function, x)
    assert not hc.is_checkpointing()
    broken.clear()
    with two_modes():
        out = run(function, x)
    broken.append(True)
    norm.requires_grad_(True)
    buffers, values = dict(norm._buffers), copy.deepcopy(norm._buffers)
    with Scaling() as outer, ScalingOperations():
        with pytest.raises(KeyError, match="broken"):
            out.sum().backward()
        assert torch.overrides._get_current_function_mode_stack() == [outer]
        assert torch._C._len_torch_dispatch_stack() == 1
    assert not hc.is_recomputing() and FACTOR.get() == 1.0
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert_same(buffers, dict(values))
    assert all(parameter.requires_grad for parameter in norm.parameters())


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "segments"])
def test_an_environment_of_another_kind_is_verified_anew(way):
    """Here a block is right in one environment alone: in the other one, each pass gives other values."""
    numbers = itertools.count(1)
    block = Block(lambda block, x: torch.tanh(x) * (next(numbers) if FACTOR.get() != 1.0 else 1))

    def train():
        WAYS[way](nn.Sequential(block, nn.Tanh()), torch.randn(3, WIDTH)).sum().backward()

    train()
    with variable(), pytest.raises(hc.RecomputationMismatch):
        train()


@pytest.mark.parametrize("mode", [Scaling, ScalingOperations])
def test_a_head_in_chunks_is_computed_by_its_layer_under_modes(mode):
    def losses(chunks):
        torch.manual_seed(0)
        head, hidden = nn.Linear(8, 32), torch.randn(6, 8)
        if chunks:
            apply_policy(head, CheckpointPolicy("chunks", chunks=chunks))
        with mode():
            logits = head(hidden)
        loss = functional.cross_entropy(logits, torch.arange(6))
        loss.backward()
        return [loss.detach(), head.weight.grad]

    assert_same(losses(3), losses(None), 1e-5)
