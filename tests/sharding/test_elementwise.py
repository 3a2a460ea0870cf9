"""Tests of the optimizers that may step shards."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from hvd_ckpt.utils.elementwise import check_elementwise

KNOWN = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
OTHERS = [name for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)]
REFUSED = r"{} .*shard='none'"


def derived(name: str) -> Any:
    return type("Derived", (getattr(torch.optim, name),), {})


@pytest.mark.parametrize(
    ("kind", "promised", "message"),
    [
        *((getattr(torch.optim, name), False, "") for name in KNOWN),
        *((getattr(torch.optim, name), True, REFUSED.format(name)) for name in OTHERS),
        *((derived(name), True, REFUSED.format("Derived")) for name in OTHERS),
        (derived("SGD"), True, ""),
        (derived("SGD"), False, "optimizer Derived .*elementwise=True"),
    ],
)
def test_elementwise_optimizers_are_known_and_others_need_a_promise(
    kind: Any, promised: bool, message: str
) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_elementwise(optimizer, promised)
