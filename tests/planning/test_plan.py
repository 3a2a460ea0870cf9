"""Tests of one plan for all ranks and of training under it: equal weights, each bucket once, no hangs."""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import raises_everywhere, same_everywhere, wrap
from residual import Listed, Residual
from same import assert_same
from torch import nn

import hvd_ckpt as hc

pytestmark = [
    pytest.mark.usefixtures("quick_planner"),
    pytest.mark.ranks(gloo=(2,)),
]


class Model(Listed):
    """Layers in a list, and one of them in use twice, as the head."""

    def __init__(self):
        super().__init__(*(Residual() for _ in range(3)))
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        return self.mix(super().forward(self.mix(x)))


def with_batch_norms():
    """Only rank 0 runs the model while it plans: nothing may wait for the others."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), hc.SyncBatchNorm(16), nn.Tanh()) for _ in range(2)]
    )


def loss_of(output):
    return output.square().mean()


def sample(step=0, rank=0):
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def plan(model, x=None, **options):
    return hc.plan(model, sample() if x is None else x, **{"loss": loss_of, "budget": "0.5x", **options})


def test_all_ranks_have_rank_0s_plan_for_the_smallest_budget_of_all():
    least = plan(Model(), sample(rank=hc.rank()), budget=300_000 - 10_000 * hc.rank())
    assert least.budget == 300_000 - 10_000 * (hc.size() - 1)
    assert least.measured.peak_bytes <= least.budget
    share = plan(Model(), budget="0.7x")
    assert share.budget == int(0.7 * share.baseline.peak_bytes)
    assert all(plans == (least, share) for plans in hc.allgather_object((least, share)))


def fail(output):
    raise KeyError("target")


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        (Model, [{"budget": 1000}, {"budget": 1001}], hc.BudgetError, "1000 B.*block"),
        (Model, [{"budget": "6GiB"}, {"budget": "six"}], ValueError, "'six'"),
        (Model, [{"budget": "0.5x"}, {"budget": "6GiB"}], ValueError, "different kinds of budget"),
        (lambda: nn.Linear(16, 16), [{}, {}], ValueError, "No chain of blocks"),
        (Model, [{"loss": fail}, {"loss": fail}], RuntimeError, "failed on rank 0: KeyError: .target"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(model, options, error, says):
    raises_everywhere(error, says, lambda: plan(model(), **options[hc.rank()]))


def wrapped(model):
    bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return wrap(model, bare, bucket_cap_mb=0.004)


def train(model, optimizer):
    """Weights and buffers; each bucket is reduced once."""
    torch.manual_seed(50 + hc.rank())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(sample(step, hc.rank()))).backward()
        optimizer.step()
        stats = optimizer.reduction_stats.last
        assert set(stats.launches.values()) == {1}
        assert not step or stats.late_gradients == []
    same_everywhere(model)
    return model.state_dict()


@pytest.mark.parametrize(
    ("make", "budget", "wrapped_first"),
    [(Model, "0.5x", False), (Model, "0.5x", True), (with_batch_norms, "min", False)],
)
def test_training_with_a_plan_is_training_without(make, budget, wrapped_first):
    model = make()
    twin = copy.deepcopy(model)
    optimizer = wrapped(model) if wrapped_first else None
    made = plan(model, budget=budget)
    assert_same(model.state_dict(), twin.state_dict())
    assert made.measured.peak_bytes < made.baseline.peak_bytes
    made.apply(model)
    assert_same(train(model, optimizer or wrapped(model)), train(twin, wrapped(twin)))
