"""Tests of averaged weights at every stage: those of torch bit for bit, wherever they are kept and saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_process import WIDTH, loss, wrap
from same import assert_same, whole_weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

EMA = get_ema_multi_avg_fn(0.8)


def build(dtype: torch.dtype = torch.float32, weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """A model with a frozen and a strided weight."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(WIDTH, 33), nn.BatchNorm1d(33), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    model[2].weight.requires_grad_(False)
    model[4].weight = nn.Parameter(model[4].weight.detach().t().contiguous().t())
    model.load_state_dict(weights or {}, strict=False)
    return model.to(dtype)


def momentum(model: nn.Module) -> torch.optim.SGD:
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def wrapped(model: nn.Module, stage: int, **options: Any) -> Any:
    return wrap(model, momentum(model), shard=stage, bucket_cap_mb=0.002, **options)


def train(model: Any, optimizer: Any, numbers: range, average: Any = None) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss(model, number, 0).backward()  # the same on every rank, so that sums are exact
        optimizer.step()
        if average is not None:
            average.update_parameters()


def averaged(average: hc.AveragedWeights, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    with average.applied():
        return whole_weights(model, optimizer)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {"multi_avg_fn": EMA}), (1, {}), (2, {"multi_avg_fn": EMA}), (3, {"avg_fn": get_ema_avg_fn(0.8)})],
)
def test_the_average_is_torchs_and_leaves_no_trace(stage: int, options: dict[str, Any]) -> None:
    plain = build()
    theirs = AveragedModel(plain, **options)
    bare, model = momentum(plain), build()
    optimizer = wrapped(model, stage)
    ours = hc.AveragedWeights(optimizer, **options)
    for number in range(3):
        train(plain, bare, range(number, number + 1))
        theirs.update_parameters(plain)
        train(model, optimizer, range(number, number + 1), ours)
        expected = {name: one.detach() for name, one in theirs.module.named_parameters()}
        before = whole_weights(model, optimizer)
        found = averaged(ours, model, optimizer)
        assert_same(whole_weights(model, optimizer), before)
        for name, value in found.items():
            tolerance = 1e-4 if name == "2.weight" else 0.0  # of a frozen one torch rounds the average
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    assert ours.n_averaged == 3
    sample = torch.ones(2, WIDTH)
    model.eval()
    with ours.applied(), torch.no_grad():
        output = model(sample)
    theirs.module.eval()
    torch.testing.assert_close(output, theirs(sample), rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(gloo=(2,), mpi=(4,))
@pytest.mark.parametrize("stage", [0, 3])
def test_an_average_goes_on_bit_for_bit_here_and_at_any_other_stage(stage: int) -> None:
    model = build()
    optimizer = wrapped(model, stage)
    average = hc.AveragedWeights(optimizer, multi_avg_fn=EMA)
    train(model, optimizer, range(3), average)
    values = whole_weights(model, optimizer)
    mine = copy.deepcopy(average.state_dict())
    parts = hc.allgather_object(mine)
    whole = copy.deepcopy(optimizer.full_state_dict(all_ranks=True))
    saved = averaged(average, model, optimizer)
    train(model, optimizer, range(3, 5), average)
    expected = averaged(average, model, optimizer)
    for other in range(4):
        twin = build(weights=values)
        again = wrapped(twin, other)
        again.load_state_dict(copy.deepcopy(whole))
        resumed = hc.AveragedWeights(again, multi_avg_fn=EMA)
        resumed.load_state_dict(mine if other == stage else parts)
        assert resumed.n_averaged == 3
        assert_same(averaged(resumed, twin, again), saved)
        train(twin, again, range(3, 5), resumed)
        assert_same(averaged(resumed, twin, again), expected)
    members = hc.add_process_set([0])  # as a job of one rank
    twin = build(weights=values)
    again = wrapped(twin, 3 - stage, process_set=members)
    if hc.rank() == 0:
        resumed = hc.AveragedWeights(again, multi_avg_fn=EMA)
        resumed.load_state_dict(parts)
        assert_same(averaged(resumed, twin, again), saved)
    hc.barrier()
    hc.remove_process_set(members)
    if stage:
        with pytest.raises(ValueError, match="the average of"):
            average.load_state_dict({**mine, "averages": {}} if hc.rank() == 1 else mine)
    train(model, optimizer, range(5, 6), average)


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_lossy_wires_and_offload_are_left_as_they_were(stage: int) -> None:
    ends = []
    for looks in (False, True):
        model = build(torch.bfloat16)
        optimizer = wrapped(model, stage, wire="int8", offload="optimizer")
        average = hc.AveragedWeights(optimizer, multi_avg_fn=EMA)
        for number in range(3):
            if looks:
                averaged(average, model, optimizer)
            train(model, optimizer, range(number, number + 1), average)
        ends.append((whole_weights(model, optimizer), averaged(average, model, optimizer)))
        assert all(one.dtype is torch.float32 for one in average.state_dict()["averages"].values())
    for one, other in zip(*ends):
        assert_same(one, other)


def test_what_is_wrong_is_said_in_a_sentence() -> None:
    model = build()
    with pytest.raises(TypeError, match="DistributedOptimizer"):
        hc.AveragedWeights(momentum(model))
    optimizer = wrapped(model, 3)
    average = hc.AveragedWeights(optimizer)
    with optimizer.gathered_parameters(), pytest.raises(RuntimeError, match="enter that inside it"):
        average.applied().__enter__()
    train(model, optimizer, range(2), average)
    with average.applied():
        for call in (
            optimizer.step,
            average.update_parameters,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: optimizer.add_param_group({"params": [model[2].weight]}),
        ):
            with pytest.raises(RuntimeError, match=r"AveragedWeights\.applied\(\)"):
                call()
