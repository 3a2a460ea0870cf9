"""Tests of running statistics: with recomputation, they equal those without it bit for bit."""

import copy
import functools
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from same import assert_same, gradients
from torch import nn
from ways import VARIANTS, plainly, reentrant, saving

from hvd_ckpt.batchnorm import SyncBatchNorm
from hvd_ckpt.processes.runtime import init
from hvd_ckpt.recompute import checkpoint


@pytest.fixture(autouse=True, scope="module")
def _horovod():
    init()


class OwnForward(nn.BatchNorm2d):
    """Updates its statistics without counting batches."""

    def forward(self, input):
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps
        )


KINDS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "cumulative average": lambda: nn.BatchNorm2d(4, momentum=None),
    "SyncBatchNorm, cumulative average": lambda: SyncBatchNorm(4, momentum=None),
    "without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "SyncBatchNorm without statistics": lambda: SyncBatchNorm(4, track_running_stats=False),
    "lazy": nn.LazyBatchNorm2d,
    "subclass with a forward of its own": lambda: OwnForward(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


class Block(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.norm = nn.BatchNorm2d(4) if norm is None else norm
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x):
        return self.norm(x * self.scale).sin()


def batches():
    torch.manual_seed(5)
    return [torch.randn(6, 4, 3, 3) * 2 + 1 for _ in range(3)]


def train(module, run, backward_passes=2, raw_data=False, dtype=None):
    """Gradients and statistics after three batches."""
    for x in batches():
        x = x.to(dtype).requires_grad_(not raw_data)
        y = run(x)
        for index in range(backward_passes):
            y.float().square().sum().backward(retain_graph=index < backward_passes - 1)
    return [*gradients(module), *module.buffers(), x.grad]


@VARIANTS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(run, kind):
    plain, block = Block(KINDS[kind]()), Block(KINDS[kind]())
    buffers = dict(block.norm._buffers)
    assert_same(train(plain, plain), train(block, functools.partial(run, block)))
    # The buffers themselves are the module's own again, not the copies.
    assert all(block.norm._buffers[name] is buffer for name, buffer in buffers.items())


class Trainer:
    def __init__(self, model):
        self.models = {"main": model}

    def forward(self, x):
        return self.models["main"](x)


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("block",)


GLOBAL = {}
HOLDER = SimpleNamespace()


def through_a_global(x):
    return GLOBAL["block"](x)


def ways(block):
    """Functions that lead to the block."""
    GLOBAL["block"] = HOLDER.block = block
    layers, objects, slots = [block], [SimpleNamespace(block=block)], Slots()
    slots.block = block
    held = {
        "slots": (0, [slots]),
        "deque": (0, deque(objects)),
        "a longer way first": ([[[objects]]], objects),
        "a way through an object first": (SimpleNamespace(all=objects), objects),
        "numbers of the system": (random.SystemRandom(), objects),
    }

    @functools.wraps(block.forward)
    def decorated(x):
        return block(x)

    return {
        "method": block.forward,
        "closure": lambda x: block(x),
        "decorated": decorated,
        "list in a closure": lambda x: layers[0](x),
        "default": lambda x, m=block: m(x),
        "partial": functools.partial(lambda m, x: m(x), block),
        "partial with a keyword": functools.partial(lambda x, m: m(x), m=block),
        "method of an object": Trainer(block).forward,
        "global": through_a_global,
        "global object": lambda x: HOLDER.block(x),
        "another function": lambda x: through_a_global(x),
        "nested function": lambda x: (lambda y: block(y))(x),
        **{name: functools.partial(lambda both, x: both[1][0].block(x), both) for name, both in held.items()},
    }


@VARIANTS
@pytest.mark.parametrize("way", list(ways(nn.Identity())))
def test_every_way_to_hold_the_module(run, way):
    """Parameters get gradients, too, though the input needs none."""
    plain, block = Block(), Block()
    expected = train(plain, plain, raw_data=True)
    assert_same(expected, train(block, functools.partial(run, ways(block)[way]), raw_data=True))


@VARIANTS
def test_module_used_twice_and_modes_mixed_in_one_region(run):
    def trained(run):
        norm, frozen = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, affine=False)
        frozen.running_mean.fill_(0.5)
        frozen.eval()

        def function(x):
            norm.train()
            y = norm(norm(x * 3 + 1).sin() + 2).exp()
            norm.eval()  # normalizes by what the two uses above have left in the statistics
            y = frozen(norm(y)).sin()
            norm.train()
            return y

        return train(nn.ModuleList([norm, frozen]), functools.partial(run, function))

    assert_same(trained(plainly), trained(run))


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (lambda block: functools.partial(saving(torch.ops.aten.convolution.default), block), 1),
        (lambda block: torch.compile(lambda x: checkpoint(block, x), backend="eager"), 2),
        (lambda block: functools.partial(reentrant, torch.compile(block, backend="eager")), 2),
    ],
    ids=["selective", "compiled around", "compiled inside"],
)
def test_selective_checkpointing_and_compilation(run, passes):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model = copy.deepcopy(plain)
    expected = train(plain, plain, backward_passes=passes)
    assert_same(expected, train(model, run(model), backward_passes=passes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_sync_batch_norm_on_one_rank_is_batch_norm(dtype, kind):
    plain, synchronized = nn.BatchNorm2d(4, dtype=dtype, **kind), SyncBatchNorm(4, dtype=dtype, **kind)
    assert_same(train(plain, plain, dtype=dtype), train(synchronized, synchronized, dtype=dtype))
    x = batches()[0].to(dtype)
    assert torch.equal(plain.eval()(x), synchronized.eval()(x))
    for shape in ((4,), (2, 3)):
        with pytest.raises(ValueError, match=rf"4 channels.*\({', '.join(map(str, shape))},?\)"):
            synchronized(torch.randn(shape))
