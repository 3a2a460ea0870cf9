"""Tests of a wrong recomputation on one rank: an error that names the module, on every rank where gradients are reduced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from one_process import wrap
from sharded import distribute
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))

WAYS: dict[str, dict[str, Any]] = {
    "buckets": {},
    "passes": {"backward_passes_per_step": 2},
    "replicas": {"replicas": 4},
    "stage 1": {"shard": "optimizer"},
    "stage 2": {"shard": "gradients"},
    "stage 3": {"shard": "parameters"},
}


class Forgetful(nn.Module):
    """Counts its passes, recomputations too, and scales by the count on some ranks."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.broken = broken
        self.count = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.linear(x) * (self.count if self.broken else 1)
        return out.sin()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mismatch_on_one_rank_is_raised_on_all(way: str, reentrant: bool) -> None:
    if way == "replicas" and hc.size() not in (2, 4):
        pytest.skip("replicas are a power of two")
    torch.manual_seed(0)
    last = hc.size() - 1
    model = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == last), nn.Linear(4, 1))
    options = {"model": model, **WAYS[way]}
    optimizer = distribute(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )

    def backward() -> None:
        passes = options.get("backward_passes_per_step", 1)
        contexts = optimizer.local_replicas() if way == "replicas" else [nullcontext()] * passes
        for context in contexts:
            with context:
                hidden = hc.checkpoint(model[1], model[0](torch.randn(3, 4)), use_reentrant=reentrant)
                model[2](hidden).sum().backward()

    backward()
    with pytest.raises(hc.RecomputationMismatch, match=f"rank {last}: .*Forgetful"):
        optimizer.step()
    model[1].broken = False
    for _ in range(2):  # training may go on
        optimizer.zero_grad()
        backward()
        optimizer.step()


def recomputed(model: nn.Sequential) -> torch.Tensor:
    return hc.checkpoint(model[1], model[0](torch.randn(3, 4)))


def test_a_mismatch_in_a_pass_of_two_optimizers_is_raised_by_both() -> None:
    """Whichever steps first must not take the step."""
    torch.manual_seed(0)
    generator, discriminator = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == 0)), nn.Linear(4, 1)
    optimizers = [wrap(generator), wrap(discriminator)]
    discriminator(recomputed(generator)).sum().backward()
    for optimizer in optimizers:
        with pytest.raises(hc.RecomputationMismatch, match="rank 0: .*Forgetful"):
            optimizer.step()
    generator[1].broken = False
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        discriminator(recomputed(generator)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_a_mismatch_in_a_pass_without_a_distributed_optimizer_is_raised_at_once() -> None:
    """Another optimizer has begun a step, and may never end it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = wrap(model)
    model(torch.randn(3, 4)).sum().backward()
    plain = nn.Sequential(nn.Linear(4, 4), Forgetful(hc.rank() == 0))
    with pytest.raises(hc.RecomputationMismatch) if hc.rank() == 0 else nullcontext():
        recomputed(plain).sum().backward()
    optimizer.step()
