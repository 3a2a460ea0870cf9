"""Tests of plans for unusual models: no errors of the planner, equal bits, and no change of the caller's objects."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from odd_blocks import BLOCKS, WIDTH, loss_of, models, same, seed, step, tensors_of
from quick_planner import quick_planner
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.app.cli.plan_show import print_plan
from hvd_ckpt.recompute.reach import reach

ROWS = 6
LEFT_OUT = ("cached weight",)  # a block that keeps a part of its graph for later passes
NAMES = [name for name in BLOCKS if name not in LEFT_OUT]
MIXED = [NAMES[first : first + 4] for first in range(0, len(NAMES), 4)]
PASSED = {name: made for name, made in models().items() if name.startswith("passed")}


@pytest.fixture(autouse=True)
def _smallest(one_thread: None) -> Iterator[None]:
    """Plans recompute at any cost."""
    warnings.simplefilter("ignore")
    with quick_planner(smallest=True):
        yield


def random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]


def smallest(model: nn.Module, sample: Any) -> hc.Plan:
    return hc.plan(model, sample, loss=loss_of, budget="min", verbose=False)


def check(make: Callable[[], nn.Module], sample: Any) -> None:
    torch.manual_seed(0)
    expected = step(make(), sample)
    torch.manual_seed(0)
    model = make()
    seed()
    before, tensors, given = random_states(), copy.deepcopy(tensors_of(model)), copy.deepcopy(sample)
    plan = smallest(model, sample)
    assert all(torch.equal(*pair) for pair in zip(tensors, tensors_of(model), strict=True))
    assert all(torch.equal(*pair) for pair in zip(reach(given).tensors, reach(sample).tensors, strict=True))
    assert str(before) == str(random_states())
    torch.manual_seed(0)
    actual = step(plan.apply(make()), sample)
    assert all(same(*pair) for pair in zip(expected, actual, strict=True)), plan.notes


@pytest.mark.parametrize("names", MIXED, ids=", ".join)
def test_a_plan_keeps_bits_and_the_callers_objects(names: list[str]) -> None:
    check(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(BLOCKS[name]() for name in names)),
        torch.randn(ROWS, WIDTH),
    )


@pytest.mark.parametrize("name", PASSED)
def test_a_plan_of_blocks_that_pass_containers(name: str) -> None:
    make, sample_of = PASSED[name]
    check(make, sample_of(torch.randn(ROWS, WIDTH)))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Sliced(nn.Module):
    """Runs the halves of a chain one after the other, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (linear(), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        half = self.layers[:4](x)
        return self.layers[4:](half) + half


def shared_activation() -> nn.Module:
    activation = nn.Tanh()
    return nn.Sequential(*[layer for _ in range(4) for layer in (linear(), activation)][:-1])


def shared_stage() -> nn.Module:
    stage = nn.Sequential(linear(), nn.Tanh(), linear())
    return nn.Sequential(linear(), stage, nn.Tanh(), stage, linear())


@pytest.mark.parametrize("make", [Sliced, shared_activation, shared_stage])
def test_a_chain_with_modules_at_several_places_or_in_slices(make: Callable[[], nn.Module]) -> None:
    check(make, torch.randn(ROWS, WIDTH))


def test_a_slice_of_a_planned_chain_runs() -> None:
    model, x = Sliced().layers, torch.randn(ROWS, WIDTH)
    expected = model[2:6](x)
    assert torch.equal(smallest(model, x).apply(model)[2:6](x), expected)


def test_scripted_modules_are_left_as_they_are() -> None:
    def make() -> nn.Module:  # the gradients of a copy of a scripted module do not show in its parameters
        seed()
        blocks = [torch.jit.script(nn.Sequential(linear(), nn.Tanh())) for _ in range(3)]
        return nn.Sequential(linear(), *blocks)

    x = torch.randn(ROWS, WIDTH)
    expected, model = step(make(), x), make()
    actual = step(smallest(model, x).apply(model), x)
    torch.testing.assert_close(actual, expected)  # scripted code has other bits once it is optimized


class Counting(nn.Module):
    """A function of how often it was called, hidden where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = linear(), iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.a(x)) * (1 + next(self.calls))


def test_a_plan_says_which_blocks_it_cannot_recompute_and_why() -> None:
    plan = smallest(nn.Sequential(*[Counting() for _ in range(4)]), torch.randn(ROWS, WIDTH))
    reason = "in no segment: it gives other values in each run."
    assert plan.notes == (f"0: {reason}", f"1 .. 3 (3 blocks): {reason}")
    assert not any(isinstance(item, tuple) for item in plan.items)
    console = Console(width=200, file=io.StringIO())
    print_plan(plan, console, None)
    assert all(note in console.file.getvalue() for note in plan.notes)
