"""Tests of convert() of SyncBatchNorm and DeferredBatchNorm: the modules that they convert remain the same objects."""

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
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, hvd.SyncBatchNorm, Elsewhere,
]  # fmt: skip
CONVERSIONS = [
    *((hc.SyncBatchNorm, kind) for kind in KINDS),
    *((hc.DeferredBatchNorm, kind) for kind in KINDS[:3]),
]


@pytest.mark.parametrize(("target", "kind"), CONVERSIONS)
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
def test_everything_stays(target: Any, kind: Any, options: dict[str, Any]) -> None:
    norm = kind(4, **options)
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data = torch.rand(tensor.shape).add(0.5).to(tensor.dtype)
    model = nn.Sequential(nn.Linear(4, 4), norm, norm).eval()
    before = copy.deepcopy(model.state_dict())
    called: list[Any] = []
    norm.register_forward_hook(lambda *_: called.append("after"))
    norm.register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].train()
    parameters = list(model.parameters())
    assert target.convert(model) is model
    assert type(model[1]) is target and model[1] is model[2] is norm
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
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


@pytest.mark.parametrize(
    ("target", "norm"),
    [
        (hc.SyncBatchNorm, WithActivation(4)),
        (hc.SyncBatchNorm, nn.LazyBatchNorm2d()),
        (hc.DeferredBatchNorm, nn.LazyBatchNorm2d()),
    ],
)
def test_what_cannot_be_converted_is_named(target: Any, norm: nn.Module) -> None:
    with pytest.raises(ValueError, match="'1'"):
        target.convert(nn.Sequential(nn.Linear(4, 4), norm))


@pytest.mark.parametrize(
    ("target", "norm"),
    [
        (hc.SyncBatchNorm, hc.DeferredBatchNorm(4)),
        (hc.DeferredBatchNorm, nn.SyncBatchNorm(4)),
        (hc.DeferredBatchNorm, hc.SyncBatchNorm(4)),
        (hc.DeferredBatchNorm, WithActivation(4)),
    ],
)
def test_others_stay(target: Any, norm: nn.Module) -> None:
    kind = type(norm)
    assert type(target.convert(nn.Sequential(norm))[0]) is kind
