"""``import hvd_ckpt as hvd`` can stand in for ``import horovod.torch as hvd``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import horovod.torch
import pytest
import torch
from forked import Case, run_forked

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


@pytest.mark.parametrize("make", [hc.DistributedOptimizer, hc.LocalSGD, hc.estimate_memory])
def test_an_option_of_shards_by_itself_is_an_error_that_says_where_to_give_it(make: Any) -> None:
    options = {field.name for field in dataclasses.fields(hc.Shard)} - {"states"}
    moved = options - set(inspect.signature(make).parameters)
    assert moved >= {"offload", "offload_folder", "units", "elementwise"}
    for name in moved:
        with pytest.raises(TypeError, match=rf"no argument '{name}': give shard=hc.Shard\(\.\.\., {name}="):
            make(torch.nn.Linear(2, 2), 1, **{name: None})


PLAIN = """
import hvd_ckpt as hc
hc.init()
model = torch.nn.Linear(2, 2)
optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("hvd_ckpt.")}))
"""


def test_a_plain_optimizer_loads_neither_shards_nor_recomputation() -> None:
    result = run_forked("import sys, torch", {"plain": Case(PLAIN)})["plain"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["collectives", "distributed", "processes", "reduction", "utils"]


def test_a_name_that_has_changed_names_the_new_one() -> None:
    for old, new in vars(hc)["RENAMED"].items():
        assert old not in hc.__all__
        assert getattr(hc, new.split(".")[0].split("(")[0]) is not None
        with pytest.raises(AttributeError, match=f"'{old}': use hvd_ckpt.{re.escape(new)}"):
            getattr(hc, old)
