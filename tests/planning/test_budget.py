"""Tests of budgets: how they are spelled, a device that is too small, and the largest batch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from residual import Residual
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.planning.budget import Budget, BudgetError, parse_budget
from hvd_ckpt.planning.step import Step
from hvd_ckpt.utils.text import show_bytes

CPU = torch.device("cpu")
KEEP = 1_000_000


@pytest.mark.parametrize(
    "text, expected",
    [
        (12345, 12345),
        (1.5e6, 1_500_000),
        ("12345", 12345),
        ("6GiB", 6 * 1024**3),
        ("6 gib", 6 * 1024**3),
        ("6G", 6 * 1024**3),
        ("6GB", 6 * 1000**3),
        ("1.5KiB", 1536),
        (".5 MB", 500_000),
        ("512B", 512),
        ("2T", 2 * 1024**4),
        ("0.3x", 300_000),
        (" 1.2X ", 1_200_000),
        (None, None),
        ("fastest", None),
    ],
)
def test_budget_in_bytes(text, expected):
    assert parse_budget(text).bytes(KEEP, CPU) == expected
    assert parse_budget("min") == parse_budget("MIN") == Budget("min")


@pytest.mark.parametrize(
    "wrong",
    ["", "six", "6 GiX", "-3GiB", "0", "0x", 0, -1, float("nan"), float("inf"), True, "1e9", [6], b"6"],
)
def test_what_is_no_budget_is_named(wrong):
    with pytest.raises(ValueError, match="budget must be bytes, or text such as '6GiB'") as caught:
        parse_budget(wrong)
    assert repr(wrong) in str(caught.value)


def test_share_of_the_device():
    half, all_of_it = (parse_budget(text).bytes(KEEP, CPU) for text in ("50%", "100%"))
    assert 1 <= half < all_of_it
    assert parse_budget("0.0001%").bytes(KEEP, CPU) == 1  # the process is larger already
    with pytest.raises(ValueError, match="101% is more than the device has"):
        parse_budget("101%")


def test_bytes_for_people():
    shown = [show_bytes(count) for count in (0, 1023, 1536, 5 * 1024**3, 2**50)]
    assert shown == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB", "1048576.00 GiB"]


def test_an_error_reaches_other_ranks_with_the_nearest_plan() -> None:
    nearest: Any = {"a": "plan"}
    error = pickle.loads(pickle.dumps(BudgetError("too small", 7, nearest)))
    assert (str(error), error.smallest, error.nearest) == ("too small", 7, nearest)


# ---- budgets that are kept ----


def chain(depth):
    return nn.Sequential(*(Residual() for _ in range(depth)))


@pytest.mark.parametrize("budget", [None, "2x", "1GiB", "min"])
def test_a_step_that_runs_out_of_memory_is_one_that_does_not_fit(budget, monkeypatch, quick_planner):
    model, x, peak = chain(4), torch.randn(512, 16), Step.peak
    capacity = 0.75 * hc.plan(model, x).baseline.peak_bytes

    def limited(step):
        found = peak(step)
        if found[0] > capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(Step, "peak", limited)
    assert hc.plan(model, x, budget=budget).measured.peak_bytes <= capacity
    capacity = 1
    with pytest.raises(hc.BudgetError, match="smaller batch"):
        hc.plan(model, x, budget=budget)


def test_largest_batch_is_the_largest(quick_planner):
    model, budget = chain(2), 2_000_000

    def sample(batch):
        return torch.randn(batch * 256, 16)

    batch, plan = hc.largest_batch(model, sample, budget)
    assert plan.measured.peak_bytes <= budget
    assert plan.sample == (("float32", (batch * 256, 16)),)
    with pytest.raises(hc.BudgetError):
        hc.plan(model, sample(batch + 1), budget=budget)
