"""Tests of plans for unusual models: no errors of the planner, equal bits, and no change of the caller's objects."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import odd_blocks
import pytest
import torch
from odd_blocks import MIDDLES, MODULES, PASSED, WIDTH, Block, Passing
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import hvd_ckpt as hc
from hvd_ckpt.app.cli.plan_show import print_plan
from hvd_ckpt.planning.planner import Planner
from hvd_ckpt.recompute.region import reach

ROWS = 6
DEPTH = 4
BUDGETS = ("min", "0.5x")


@pytest.fixture(autouse=True)
def _quick(quick_planner: None) -> None:
    warnings.simplefilter("ignore")


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    odd_blocks.GENERATOR.manual_seed(3)


def random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]


def loss_of(output: Any) -> Tensor:
    return sum(tensor.float().square().sum() for tensor in reach(output).tensors if tensor.requires_grad)


def tensors_of(model: nn.Module) -> list[Tensor]:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    generators = [one.get_state() for one in attributes if isinstance(one, torch.Generator)]
    own = [one.detach() for one in attributes if isinstance(one, Tensor)]
    return [*(one.detach() for one in model.parameters()), *model.buffers(), *own, *generators]


def step(model: nn.Module, sample: Any) -> list[Tensor | None]:
    """Loss, gradients and tensors of the model after two steps' forward and backward passes."""
    seed()
    losses = []
    for _ in range(2):
        loss = loss_of(model(copy.deepcopy(sample)))
        loss.backward()
        losses.append(loss.detach())
    gradients = [one.grad for one in model.parameters()]
    return [*losses, *gradients, *tensors_of(model), torch.rand(1)]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.is_sparse:
        return same(one.coalesce().indices(), other.coalesce().indices()) and same(
            one.coalesce().values(), other.coalesce().values()
        )
    return torch.equal(one, other)


def check(make: Callable[[], nn.Module], sample: Any) -> None:
    torch.manual_seed(0)
    expected = step(make(), sample)
    torch.manual_seed(0)
    model = make()
    seed()
    before, tensors, given = random_states(), copy.deepcopy(tensors_of(model)), copy.deepcopy(sample)
    planner = Planner(model, sample, loss=loss_of)
    for budget in BUDGETS:
        seed()
        try:
            plan = planner.plan(budget)
        except hc.BudgetError as error:
            plan = error.nearest
        assert all(torch.equal(*pair) for pair in zip(tensors, tensors_of(model), strict=True))
        assert all(
            torch.equal(*pair) for pair in zip(reach(given).tensors, reach(sample).tensors, strict=True)
        )
        assert str(before) == str(random_states())
        torch.manual_seed(0)
        actual = step(plan.apply(make()), sample)
        assert all(same(*pair) for pair in zip(expected, actual, strict=True)), plan.notes


@pytest.mark.parametrize("name", MIDDLES)
def test_code_inside_of_a_block(name: str) -> None:
    check(lambda: nn.Sequential(*[Block(MIDDLES[name]) for _ in range(DEPTH)]), torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[MODULES[name]() for _ in range(DEPTH)])

    check(make, torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("name", PASSED)
def test_containers(name: str) -> None:
    wrap, get, put = PASSED[name]
    check(lambda: nn.Sequential(*[Passing(get, put) for _ in range(DEPTH)]), wrap(torch.randn(ROWS, WIDTH)))


def test_scripted_modules_are_left_as_they_are() -> None:
    def make() -> nn.Module:  # the gradients of a copy of a scripted module do not show in its parameters
        seed()
        blocks = [torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(3)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)

    x = torch.randn(ROWS, WIDTH)
    expected, model = step(make(), x), make()
    actual = step(hc.plan(model, x, loss=loss_of, budget="min", verbose=False).apply(model), x)
    torch.testing.assert_close(actual, expected)  # scripted code has other bits once it is optimized


class Counting(nn.Module):
    """A function of how often it was called, hidden where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(WIDTH, WIDTH), iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.a(x)) * (1 + next(self.calls))


def test_a_plan_says_which_blocks_it_cannot_recompute_and_why() -> None:
    model, x = nn.Sequential(*[Counting() for _ in range(4)]), torch.randn(ROWS, WIDTH)
    plan = hc.plan(model, x, loss=loss_of, budget="min", verbose=False)
    reason = "in no segment: it gives other values in each run."
    assert plan.notes == (f"0: {reason}", f"1 .. 3 (3 blocks): {reason}")
    assert not any(isinstance(item, tuple) for item in plan.items)
    console = Console(width=200, file=io.StringIO())
    print_plan(plan, console, None)
    assert all(note in console.file.getvalue() for note in plan.notes)
