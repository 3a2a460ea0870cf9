"""Tests of SyncBatchNorm.convert: the modules that it converts, which remain the same objects."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_ckpt as hc


class Elsewhere(nn.modules.batchnorm._BatchNorm):
    """A synchronized batch norm of another library, such as Apex's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is replaced")


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


KINDS: list[Any] = [
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    hvd.SyncBatchNorm,
    Elsewhere,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.3},
    ],
    ids=str,
)
def test_everything_stays(kind: Any, options: dict[str, Any]) -> None:
    norm = kind(4, **options)
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data = torch.rand(tensor.shape).add(0.5).to(tensor.dtype)
    model = nn.Sequential(nn.Linear(4, 4), norm, norm).eval()
    before = copy.deepcopy(model.state_dict())
    called: list[Any] = []
    norm.register_forward_hook(lambda *_: called.append("after"))
    norm.register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].train()
    assert hc.SyncBatchNorm.convert(model) is model
    assert type(model[1]) is hc.SyncBatchNorm and model[1] is model[2] is norm
    assert not norm.training and model[0].training
    for name, value in {
        "affine": True,
        "momentum": 0.1,
        "eps": 1e-5,
        "track_running_stats": True,
        **options,
    }.items():
        assert getattr(norm, name) == value
    assert {name: one.tolist() for name, one in model.state_dict().items()} == {
        name: one.tolist() for name, one in before.items()
    }
    if options.get("track_running_stats", True):
        model(torch.rand(3, 4))
        assert called == ["before", "after"] * 2


def test_a_model_that_is_a_batch_norm() -> None:
    norm = nn.SyncBatchNorm(3)
    assert hc.SyncBatchNorm.convert(norm) is norm and type(norm) is hc.SyncBatchNorm


@pytest.mark.parametrize("kind", [WithActivation(4), nn.LazyBatchNorm2d()], ids=["forward", "lazy"])
def test_what_cannot_be_converted_is_named(kind: nn.Module) -> None:
    with pytest.raises(ValueError, match="'1'"):
        hc.SyncBatchNorm.convert(nn.Sequential(nn.Linear(4, 4), kind))


def test_deferred_batch_norm_stays() -> None:
    model = hc.DeferredBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(4)))
    assert type(hc.SyncBatchNorm.convert(model)[0]) is hc.DeferredBatchNorm
