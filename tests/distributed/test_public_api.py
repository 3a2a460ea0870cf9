"""``import hvd_ckpt as hvd`` can stand in for ``import horovod.torch as hvd``."""

from __future__ import annotations

import inspect

import horovod.torch
import pytest

import hvd_ckpt as hc


def test_every_public_name_of_horovod_is_here() -> None:
    theirs = {name for name in dir(horovod.torch) if not name.startswith("_")}
    assert theirs <= set(dir(hc))
    assert theirs <= set(hc.__all__)
    for name in hc.__all__:
        assert getattr(hc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'allreduced'"):
        hc.allreduced  # noqa: B018


def test_distributed_optimizer_takes_horovods_arguments() -> None:
    theirs = inspect.signature(horovod.torch.DistributedOptimizer).parameters
    ours = inspect.signature(hc.DistributedOptimizer).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
