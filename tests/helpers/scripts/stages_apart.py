"""Arguments of a pipeline that one process has alone, or that no pipeline takes: one error on all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvd_ckpt as hc

hc.init(stages=2, stall_timeout=60)
process = hc.grid().stage * hc.size() + hc.rank()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


ALONE: dict[str, Any] = {
    "chunks": 3,
    "balance": [1, 3],
    "schedule": "gpipe",
    "checkpoint": "never",
    "sample": torch.ones(2, 4),
    "virtual_stages": 1,
}
for owner in (0, 2 * hc.size() - 1):
    for name, value in ALONE.items():
        given = {"chunks": 2, **({name: value} if process == owner else {})}
        with pytest.raises(ValueError, match=f"Pipeline: {name} differs between ranks"):
            hc.Pipeline(model(), **given)
WRONG: list[dict[str, Any]] = [
    {"chunks": None},
    {"chunks": 2, "sample": torch.ones(2, 4), "balance": "bytes"},
    {"chunks": 2, "balance": [4]},
    {"chunks": 2, "schedule": "x"},
]
for wrong in WRONG:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        hc.Pipeline(model(), **wrong)
built = hc.Pipeline(model(), chunks=2)
mine = [one for one in built.parameters() if not one.is_meta]
with pytest.raises(ValueError, match="replicas=.* cannot be used with stages=2"):
    hc.DistributedOptimizer(torch.optim.SGD(mine, lr=0.1), built.named_parameters(), replicas=4, model=built)
print("refused", flush=True)
