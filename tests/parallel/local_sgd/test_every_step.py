"""Tests of averages after every step, which equal steps on averaged gradients in all scenarios of the comparison."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hvd_ckpt as hc
from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.reference import largest_difference, make_reference
from hvd_ckpt.app.compare.runner.engines import ENGINES
from hvd_ckpt.app.compare.scenarios import SCENARIOS
from hvd_ckpt.app.compare.training import train
from hvd_ckpt.app.compare.workloads import make_workload

pytestmark = pytest.mark.ranks(gloo=(2, 3), mpi=(4,))


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_average_after_every_step_ends_in_the_weights_of_one_process(name: str, one_thread: None) -> None:
    engine, settings = ENGINES["local"](), TrainingSettings(steps=4, seed=1)
    engine.start(Path())
    workload = make_workload(name, settings)
    if engine.refuses(workload) is not None:
        assert name in ("changing-graph", "mixed-dtypes", "overflow-on-one-rank", "uneven-data")
        return
    trained = train(workload, engine, Cell(name, workload.variants[0], 2), settings)
    expected = make_reference(workload, hc.size(), settings)
    assert largest_difference(trained.parameters, expected.parameters, expected.start)[1] < workload.tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_before_and_after_the_mean(dtype: torch.dtype, one_thread: None) -> None:
    torch.manual_seed(3)
    model = nn.Linear(8, 8).to(dtype)
    twin = copy.deepcopy(model)
    optimizer = hc.LocalSGD(
        torch.optim.SGD(model.parameters(), lr=0.5), list(model.named_parameters()), every=1
    )
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(hc.rank())).to(dtype)
    for _ in range(5):
        for one, step in (model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.5)):
            step.zero_grad()
            one(inputs).float().square().mean().backward()
            step.step()
        with torch.no_grad():
            for parameter in twin.parameters():
                own = hc.allgather_object(parameter.detach().double())
                parameter.copy_(sum(own) / len(own))
        for one, other in zip(model.parameters(), twin.parameters()):
            assert torch.equal(one, other)
