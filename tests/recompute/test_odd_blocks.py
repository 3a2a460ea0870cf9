"""Odd blocks in every way of recomputation: losses, gradients, buffers and random numbers are those of plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from call_names import names_of_calls
from odd_blocks import GENERATOR, MIDDLES, WIDTH, Block, models, same, step
from selective import checkpointed, on_cpu, some
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from ways import Run, each, in_segments

import hvd_ckpt as hc
from hvd_ckpt.planning.policy import CheckpointPolicy, apply_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def in_lambdas(model: nn.Sequential, x: Any) -> Any:
    for number in range(len(model)):
        x = hc.checkpoint(lambda y, number=number: model[number](y), x)
    return x


def under_policies(seed: int, around: Run = nn.Module.__call__) -> Run:
    """Each block drops some results, within ``around``."""

    def run(model: nn.Sequential, x: Tensor) -> Any:
        states = random.getstate(), np.random.get_state(), GENERATOR.get_state()
        calls = [names_of_calls(block, x.detach()) for block in model]
        random.setstate(states[0])
        np.random.set_state(states[1])
        GENERATOR.set_state(states[2])
        for block, names in zip(model, calls):
            apply_policy(block, CheckpointPolicy("some", some(names, seed)))
        return each(around)(model, x)

    return run


WAYS: dict[str, Run] = {
    "segments": in_segments(False),
    "reentrant segments": in_segments(True),
    "lambdas": in_lambdas,
    **{f"policy {seed}": under_policies(seed) for seed in range(4)},
}
REPEATED = {
    "counter",
    "operator with its own noise",
    "module: remembering",
    "module: memory of NumPy",
}  # other values each time
HOOKED = {"func.grad", "func.jacrev"}  # which PyTorch does not combine with hooks on saved tensors
UNRECORDED = {
    "gradient inside",
    "hooks",
    "reentrant checkpoint inside",
    "reentrant region inside",
}  # without gradients at first
REFUSED = {
    "segments": REPEATED | HOOKED,
    "reentrant segments": REPEATED | UNRECORDED,
    "lambdas": REPEATED | HOOKED,
}
OF_POLICIES = HOOKED | {
    "operator with its own noise",
    "operator with Python's noise",
    "module: instance norm",
}
"""Blocks that a way may refuse with an error; what it computes is right all the same."""
UNFIT = {
    "policies": {
        "module: old weight norm",
        "module: old spectral norm",
        "module: pruned",
    },  # cannot be copied
    "regions": {
        f"passed: {what} changed in place" for what in ("list", "object", "tensor")
    },  # nor can PyTorch
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@functools.cache
def expected_of(name: str) -> list[Tensor | None]:
    return steps_of(name, None)


def steps_of(name: str, run: Run | None) -> list[Tensor | None]:
    make, sample_of = models()[name]
    torch.manual_seed(0)
    model = make()
    return step(model, sample_of(torch.randn(6, WIDTH)), *([] if run is None else [run]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", models())
def test_recomputed_or_not(name: str, way: str) -> None:
    policy = way.startswith("policy")
    if name in UNFIT["policies" if policy else "regions"]:
        pytest.skip("it is not made for this")
    if name.startswith("passed") and not way.endswith(("segments", "lambdas")):
        pytest.skip("it takes tensors")
    expected = expected_of(name)
    refused = name in (OF_POLICIES if policy else REFUSED[way])
    with contextlib.suppress(RuntimeError) if refused else contextlib.nullcontext():
        assert all(map(same, expected, steps_of(name, WAYS[way])))


def copied(block: nn.Module, x: Tensor) -> Any:
    """Hooks that give back other memory, in another layout."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        return block(x)


def twice(block: nn.Module, x: Tensor) -> Any:
    return hc.checkpoint(lambda y: hc.checkpoint(block, y).sin(), x)


@pytest.mark.parametrize("around", [on_cpu, copied, checkpointed, twice])
@pytest.mark.parametrize(
    "name",
    [
        "module: encoder layer",
        "module: in-place activations",
        "module: batch norm",
        "kernel",
        "lists",
        "writes",
    ],
)
def test_policies_under_other_saved_tensor_hooks(name: str, around: Run) -> None:
    # PyTorch itself is not exact under copying hooks.
    expected = steps_of(name, None if around is copied else each(around))
    for seed in range(4):
        assert all(map(same, expected, steps_of(name, under_policies(seed, around))))


class Asking(Block):
    """Asks for a gradient inside its forward pass, for which a region is recomputed in the middle of its first pass."""

    def forward(self, x: Tensor) -> Tensor:
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
def test_a_region_that_is_recomputed_in_the_middle_of_its_first_pass(name: str, way: str) -> None:
    def trained(run: Run) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Asking(MIDDLES[name]) for _ in range(3)))
        return step(model, torch.randn(6, WIDTH), lambda model, x: run(model[1:], F.gelu(model[0](x))))

    assert all(map(same, trained(lambda model, x: model(x)), trained(WAYS[way])))


@pytest.mark.parametrize("way", ["segments", "reentrant segments", "lambdas"])
def test_kernels_of_the_forward_pass(way: str) -> None:
    def attend(block: Any, x: Tensor) -> Tensor:
        heads = x.view(1, len(x), 2, -1).transpose(1, 2)
        mixed: Tensor = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return mixed.transpose(1, 2).reshape(x.shape)

    def trained(run: Run) -> list[Tensor | None]:
        def within(model: Any, x: Tensor) -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return run(model, x)

        torch.manual_seed(0)
        return step(nn.Sequential(*(Block(attend) for _ in range(4))), torch.randn(6, WIDTH), within)

    assert all(map(same, trained(lambda model, x: model(x)), trained(WAYS[way])))
