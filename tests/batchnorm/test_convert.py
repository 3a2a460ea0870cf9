"""Tests of convert() of SyncBatchNorm and DeferredBatchNorm: the modules that they convert remain the same objects."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch
from same import assert_same
from torch import nn

import hvd_ckpt as hc


class Elsewhere(nn.modules.batchnorm._BatchNorm):
    """A synchronized batch norm of another library, such as Apex's."""


class WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


PLAIN = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
SYNCHRONIZED = [nn.SyncBatchNorm, hvd.SyncBatchNorm, Elsewhere]
DEFAULTS = {"affine": True, "momentum": 0.1, "eps": 1e-5, "track_running_stats": True}


@pytest.mark.parametrize(
    ("target", "kind"),
    [(hc.SyncBatchNorm, kind) for kind in PLAIN + SYNCHRONIZED]
    + [(hc.DeferredBatchNorm, kind) for kind in PLAIN],
)
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
def test_everything_stays(target, kind, options):
    norm = kind(4, **options)
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data = torch.rand(tensor.shape).add(0.5).to(tensor.dtype)
    model = nn.Sequential(nn.Linear(4, 4), norm, norm).eval()
    before, parameters, called = copy.deepcopy(model.state_dict()), list(model.parameters()), []
    norm.register_forward_hook(lambda *_: called.append("after"))
    norm.register_forward_pre_hook(lambda *_: called.append("before"))
    model[0].train()
    assert target.convert(model) is model
    assert type(model[1]) is target and model[1] is model[2] is norm
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not norm.training and model[0].training
    assert {name: getattr(norm, name) for name in DEFAULTS} == {**DEFAULTS, **options}
    assert_same(dict(model.state_dict()), dict(before))
    if norm.track_running_stats:
        model(torch.rand(3, 4))
        assert called == ["before", "after"] * 2


@pytest.mark.parametrize(
    ("target", "norm", "outcome"),
    [
        (hc.SyncBatchNorm, WithActivation(4), "refused"),
        (hc.SyncBatchNorm, nn.LazyBatchNorm2d(), "refused"),
        (hc.DeferredBatchNorm, nn.LazyBatchNorm2d(), "refused"),
        (hc.SyncBatchNorm, hc.DeferredBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, nn.SyncBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, hc.SyncBatchNorm(4), "stays"),
        (hc.DeferredBatchNorm, WithActivation(4), "stays"),
    ],
)
def test_others_stay_or_are_named_as_what_cannot_be_converted(target, norm, outcome):
    model, kind = nn.Sequential(nn.Linear(4, 4), norm), type(norm)
    if outcome == "refused":
        with pytest.raises(ValueError, match="'1'"):
            target.convert(model)
    else:
        assert type(target.convert(model)[1]) is kind


def test_a_model_that_is_a_batch_norm():
    norm = nn.SyncBatchNorm(3)
    assert hc.SyncBatchNorm.convert(norm) is norm and type(norm) is hc.SyncBatchNorm
