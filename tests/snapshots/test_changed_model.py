"""A save has the tensors that model and optimizer have then, also where they have changed since the save before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import distribute
from snapshot_files import read_snapshot
from torch import Tensor, nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))


def replace_buffer(model: nn.Module, optimizer: Any) -> None:
    model[1].running_mean = torch.full((3,), 5.0)


def resize_buffer(model: nn.Module, optimizer: Any) -> None:
    model.seen.resize_(7).fill_(3)


def reorder_memory(model: nn.Module, optimizer: Any) -> None:
    model.to(memory_format=torch.channels_last)


def tie(model: nn.Module, optimizer: Any) -> None:
    del model[2].bias
    model[2].bias = model[1].bias


def rename(model: nn.Module, optimizer: Any) -> None:
    model.add_module("3", model._modules.pop("2"))


def add_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [model[2].weight]})


def forget_buffer(model: nn.Module, optimizer: Any) -> None:
    model._non_persistent_buffers_set.add("seen")


@pytest.mark.parametrize(
    "change", [replace_buffer, resize_buffer, reorder_memory, tie, rename, add_group, forget_buffer]
)
def test_a_save_after_a_change(folder: Path, change: Callable[[nn.Module, Any], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    model.register_buffer("seen", torch.zeros(3))
    stepped = [*model[0].parameters(), *model[1].parameters()]
    optimizer = distribute(
        torch.optim.SGD(stepped, lr=0.1, momentum=0.9), model.named_parameters(), model=model
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2, 6, 6)).square().mean().backward()
        optimizer.step()

    with hc.Snapshots(folder, model=model, optimizer=optimizer, blocking=True) as snapshots:
        step()
        snapshots.save(1)
        change(model, optimizer)
        step()
        snapshots.save(2)
    found = read_snapshot(folder / "snapshots" / "step-00000002", hc.rank())
    expected: dict[str, Tensor] = dict(model.state_dict())
    assert found.weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found.weights[name], weight), name
    assert found.weights["0.weight"].stride() == model[0].weight.stride()
    moments = found.whole_tensors("optimizer.momentum_buffer")
    for parameter, name in optimizer.parameter_names.items():
        if parameter in optimizer.state:
            assert torch.equal(moments[name], optimizer.state[parameter]["momentum_buffer"]), name
