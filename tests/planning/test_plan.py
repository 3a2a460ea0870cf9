"""Tests of one plan for all ranks and of training under it: equal weights, each bucket once, no hangs."""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import fingerprint
from residual import Residual
from torch import nn

import hvd_ckpt as hc

pytestmark = [
    pytest.mark.usefixtures("quick_planner"),
    pytest.mark.ranks(gloo=(2,)),
]


class Model(nn.Module):
    """Layers in a list, and one of them in use twice, as the head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        x = self.mix(x)
        for layer in self.layers:
            x = layer(x)
        return self.mix(x).square().mean()


def sample(step=0, rank=0):
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def everywhere(value):
    return hc.allgather_object(value)


def raised_everywhere(kind, call):
    """The message, which is the same on every rank."""
    with pytest.raises(kind) as caught:
        call()
    messages = everywhere((type(caught.value).__name__, str(caught.value)))
    assert all(message == messages[0] for message in messages)
    return caught.value


def test_all_ranks_have_rank_0s_plan_for_the_smallest_budget_of_all():
    plan = hc.plan(Model(), sample(rank=hc.rank()), budget=300_000 - 10_000 * hc.rank())
    assert plan.budget == 300_000 - 10_000 * (hc.size() - 1)
    assert plan.measured.peak_bytes <= plan.budget
    share = hc.plan(Model(), sample(), budget="0.7x")
    assert share.budget == int(0.7 * share.baseline.peak_bytes)
    assert all(plans == (plan, share) for plans in everywhere((plan, share)))


def test_impossible_budget_is_an_error_on_every_rank():
    error = raised_everywhere(hc.BudgetError, lambda: hc.plan(Model(), sample(), budget=1000 + hc.rank()))
    assert "1000 B" in str(error) and "block" in str(error)
    assert len(set(everywhere(error.smallest))) == 1


@pytest.mark.parametrize(
    ("budgets", "said"), [(("6GiB", "six"), "'six'"), (("0.5x", "6GiB"), "different kinds of budget")]
)
def test_budgets_that_do_not_go_together(budgets, said):
    budget = budgets[0] if hc.rank() == 0 else budgets[1]
    error = raised_everywhere(ValueError, lambda: hc.plan(Model(), sample(), budget=budget))
    assert said in str(error)


def test_failure_on_rank_0_is_an_error_on_every_rank():
    raised_everywhere(ValueError, lambda: hc.plan(nn.Linear(16, 16), sample(), budget="0.5x"))

    def loss(output):
        raise KeyError("target")

    with pytest.raises((KeyError, RuntimeError), match="target"):
        hc.plan(Model(), sample(), loss=loss, budget="0.5x")
    assert all(everywhere(True))


def train(model, optimizer, steps=3):
    torch.manual_seed(50 + hc.rank())
    for step in range(steps):
        optimizer.zero_grad()
        model(sample(step, hc.rank())).backward()
        optimizer.step()
        stats = optimizer.reduction_stats.last
        assert set(stats.launches.values()) == {1}
        assert not step or stats.late_gradients == []
    return fingerprint(model)


def distributed(model):
    return hc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        bucket_cap_mb=0.004,
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_training_with_a_plan_is_training_without(when):
    """Whether the plan is made before or after the optimizer is wrapped."""
    model = Model()
    twin = copy.deepcopy(model)
    optimizer = distributed(model) if when == "after" else None
    plan = hc.plan(model, sample(), budget="0.5x")
    assert any(block.policy.selective is not None for block in plan.blocks)
    plan.apply(model)
    actual = train(model, optimizer or distributed(model))
    assert actual == train(twin, distributed(twin))
    assert all(one == actual for one in everywhere(actual))


def test_synchronized_batch_norm():
    """Only rank 0 runs the model while it plans: nothing may wait for the others."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), hc.SyncBatchNorm(16), nn.Tanh()) for _ in range(2)]
    )
    start = copy.deepcopy(model)
    plan = hc.plan(model, sample(), loss=lambda output: output.square().mean(), budget="min")
    for name, value in model.state_dict().items():
        assert torch.equal(value, start.state_dict()[name]), name
    plan.apply(model)
    weights = []
    for one in (model, start):
        optimizer = distributed(one)
        for step in range(2):
            optimizer.zero_grad()
            one(sample(step, hc.rank())).square().mean().backward()
            optimizer.step()
        weights.append([value.clone() for value in one.state_dict().values()])
    assert all(torch.equal(actual, expected) for actual, expected in zip(*weights, strict=True))
