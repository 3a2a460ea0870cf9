"""Tests of predicted costs, and of the reuse of plans while nothing that they depend on changes."""

from __future__ import annotations

import copy

import pytest
import torch
from residual import Residual
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.planning.planner import Planner


@pytest.fixture(autouse=True)
def _seeded(quick_planner):
    torch.manual_seed(0)


class Listed(nn.Module):
    """A chain whose blocks join in no segment."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("chain", "autocast", "width"), [(nn.Sequential, None, 128), (Listed, torch.bfloat16, 64)]
)
def test_predicted_peaks_stay_within_the_budget_and_fall_with_it(chain, autocast, width):
    """Within 1 %; under autocast the weights that it remembers are a third of a small peak."""
    model = chain(*(Residual(width) for _ in range(6)), nn.Linear(width, 8))
    planner = Planner(model, torch.randn(8 * width, width), autocast=autocast)
    least, most = int(1.02 * planner.smallest.peak_bytes), planner.baseline.peak_bytes
    before = most
    for number in range(5):
        budget = most - (most - least) * number // 4
        plan = planner.plan(budget)
        assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
        assert plan.measured.peak_bytes <= min(budget, before)
        before = plan.measured.peak_bytes
    assert before < 0.5 * most


class Counted:
    """A loss that counts how often it is computed."""

    def __init__(self, factor=1.0):
        self.calls, self.factor = 0, factor

    def loss(self, output):
        self.calls += 1
        return self.factor * output.square().mean()


def test_a_plan_is_reused_while_nothing_changes_that_it_depends_on(tmp_path, monkeypatch):
    loss = Counted()
    options = {"loss": loss.loss, "budget": None, "cache": tmp_path / "plans"}
    model, sample = nn.Sequential(*(Residual() for _ in range(3))), torch.randn(32, 16)
    first = hc.plan(model, sample, **options)
    again = nn.Sequential(*(Residual() for _ in range(3)))
    loss.calls = 0
    assert hc.plan(again, torch.randn(32, 16), **options) == first and loss.calls == 0
    (file,) = (tmp_path / "plans").iterdir()

    def planned(model=again, sample=sample, **changed):
        loss.calls = 0
        hc.plan(model, sample, **{**options, **changed})
        return bool(loss.calls)

    assert planned(sample=torch.randn(33, 16)) and not planned(sample=torch.randn(33, 16))
    twice = Counted(factor=2.0)
    hc.plan(again, sample, **{**options, "loss": twice.loss})
    assert twice.calls
    assert planned(budget="2x") and planned(autocast=torch.bfloat16) and planned(budget="80%")
    other = copy.deepcopy(again)
    other[1].drop.p = 0.3
    assert planned(other)
    other[1].drop.p = 0.2
    assert not planned(other)
    other[1].sizes = [1, (2, 3)]
    assert planned(other) and not planned(other)
    other[2].up.weight = other[1].up.weight
    assert planned(other)
    monkeypatch.setattr(Residual, "forward", lambda self, x: self.up(self.norm(x))[:, :16])
    assert planned(again)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert planned()
    monkeypatch.undo()
    assert not planned()
    file.write_text(file.read_text()[:-40])
    assert planned() and not planned()
