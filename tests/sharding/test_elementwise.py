"""Tests of the optimizers that may step shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hvd_ckpt.utils.elementwise import check_elementwise


def made(kind: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2))], lr=0.1)


class Own(torch.optim.SGD):
    """An optimizer from elsewhere."""


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_those_of_torch_are_known(name: str) -> None:
    check_elementwise(made(getattr(torch.optim, name)))


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon", "SparseAdam"])
def test_other_optimizers_of_torch_are_refused(name: str) -> None:
    kind = getattr(torch.optim, name, None) or pytest.skip("not in this PyTorch")
    for one in (kind, type("Derived", (kind,), {})):
        with pytest.raises(ValueError, match=rf"{one.__name__} .*shard='none'"):
            check_elementwise(made(one), promised=True)


def test_one_from_elsewhere_needs_a_promise() -> None:
    check_elementwise(made(Own), promised=True)
    with pytest.raises(ValueError, match="optimizer Own .*elementwise=True"):
        check_elementwise(made(Own))
