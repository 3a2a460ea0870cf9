"""Odd blocks in every way of recomputation: losses, gradients, buffers and random numbers are those of plain PyTorch."""

import contextlib
import functools

import pytest
import torch
from odd_blocks import MIDDLES, POLICIES, WIDTH, Block, models, same, step, under_policies
from selective import checkpointed, on_cpu
from torch import nn
from torch.nn import functional as F
from ways import CHAINS, each, plainly

import hvd_ckpt as hc

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


REGIONS = {name: CHAINS[name] for name in ("segments", "reentrant segments", "lambdas")}
WAYS = {**REGIONS, **POLICIES}
# Other values each time.
REPEATED = {"counter", "operator with its own noise", "array that changes", "module: memory of NumPy"}
HOOKED = {"func.grad", "func.jacrev"}  # which PyTorch does not combine with hooks on saved tensors
UNRECORDED = {"gradient inside", "hooks", "reentrant checkpoint inside", "reentrant region inside"}
REFUSED = {
    "segments": REPEATED | HOOKED,
    "reentrant segments": REPEATED | UNRECORDED,  # without gradients at first
    "lambdas": REPEATED | HOOKED,
    "policy": HOOKED
    | {"operator with its own noise", "operator with Python's noise", "module: instance norm"},
}
"""Blocks that a way may refuse with an error; what it computes is right all the same."""
# Which they cannot be.
COPIED = {
    f"module: {name}" for name in ("old weight norm", "old spectral norm", "pruned", "sparse buffer in rows")
}
UNFIT = {
    "regions": {f"passed: {what} changed in place" for what in ("list", "object", "tensor")},  # as in PyTorch
    "policies": COPIED | {name for name in models() if name.startswith("passed")},  # of tensors alone
}
CASES = [
    (name, way)
    for name in models()
    for way in WAYS
    if name not in UNFIT["regions" if way in REGIONS else "policies"]
]


@functools.cache
def expected_of(name):
    return steps_of(name)


def steps_of(name, run=plainly):
    make, sample_of = models()[name]
    torch.manual_seed(0)
    model = make()
    return step(model, sample_of(torch.randn(6, WIDTH)), run)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_recomputed_or_not(name, way):
    expected = expected_of(name)
    refused = name in REFUSED[way if way in REGIONS else "policy"]
    with contextlib.suppress(RuntimeError) if refused else contextlib.nullcontext():
        assert all(map(same, expected, steps_of(name, WAYS[way])))


def copied(block, x):
    """Hooks that give back other memory, in another layout."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        return block(x)


def twice(block, x):
    return hc.checkpoint(lambda y: hc.checkpoint(block, y).sin(), x)


@pytest.mark.parametrize("around", [on_cpu, copied, checkpointed, twice])
@pytest.mark.parametrize(
    "name",
    ["kernel", "lists", "writes", "complex"]
    + [f"module: {name}" for name in ("encoder layer", "in-place activations", "batch norm")],
)
def test_policies_under_other_saved_tensor_hooks(name, around):
    # PyTorch itself is not exact under copying hooks.
    expected = steps_of(name, plainly if around is copied else each(around))
    for seed in range(4):
        assert all(map(same, expected, steps_of(name, under_policies(seed, around))))


class Asking(Block):
    """Asks for a gradient inside its forward pass, for which a region is recomputed in the middle of its first pass."""

    def forward(self, x):
        with torch.enable_grad():
            start = x.detach().requires_grad_() if not x.requires_grad else x
            h = torch.tanh(self.b(self.middle(self, torch.tanh(self.a(start)))))
            (slope,) = torch.autograd.grad(h.square().sum(), start, retain_graph=True)
        return torch.tanh(x + h + slope.detach())


@pytest.mark.parametrize("way", ["segments", "lambdas"])
@pytest.mark.parametrize(
    "name",
    ["moving average", "replaced buffer", "buffer written first", "large buffer", "weight written first", "cached weight",
     "python random", "numpy random", "numpy normal"],
)  # fmt: skip
def test_a_region_that_is_recomputed_in_the_middle_of_its_first_pass(name, way):
    def trained(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Asking(MIDDLES[name]) for _ in range(3)))
        return step(model, torch.randn(6, WIDTH), lambda model, x: run(model[1:], F.gelu(model[0](x))))

    assert all(map(same, trained(plainly), trained(WAYS[way])))
