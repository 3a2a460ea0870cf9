"""Tests of the spelling of budgets."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from hvd_ckpt.planning.budget import Budget, BudgetError, parse_budget
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
