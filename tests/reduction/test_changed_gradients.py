"""Tests of what code does to gradients between ``backward()`` and ``synchronize()``: it is right, or an error on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from one_process import SMALL, chain, loss, wrap
from torch import nn

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(1, 2))

several = pytest.mark.ranks(gloo=(2,), mpi=(4,))
ONE_BUCKET = 25.0
CHANGED = (
    r"gradient of parameter '[\d.]+(weight|bias)' (was changed in place|is being added up).*synchronize\(\)"
)


@contextlib.contextmanager
def raises_on_every_rank(message: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=message):
        yield
    assert hc.allreduce(torch.ones(1), op=hc.Sum, name="all have raised") == hc.size()


@several
def test_a_change_in_place_of_a_group_that_waits_is_an_error() -> None:
    """At stage 2, in a group that holds back for a parameter without a gradient."""
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, shard=2)
    model["used"](torch.ones(2, 8)).sum().backward()
    with raises_on_every_rank(r"'used\.\w+' was changed in place"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@pytest.mark.parametrize("of", ["an earlier replica", "the last replica", "all"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_change_in_place_with_replicas_is_an_error(of: str, before: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=ONE_BUCKET, replicas=8)
    for step in range(before + 1):
        optimizer.zero_grad()
        with raises_on_every_rank(CHANGED) if step == before else contextlib.nullcontext():
            for place, replica in enumerate(optimizer.local_replicas()):
                with replica:
                    loss(model, step).backward()
                    of_this = {"an earlier replica": 0, "the last replica": 8 // hc.size() - 1}.get(of)
                    if step == before and place == of_this:
                        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if step == before and of == "all":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


KEEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "a view": lambda gradient: gradient.view(-1)[1:],
}


@pytest.mark.parametrize("bucket_cap_mb", [SMALL, ONE_BUCKET])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("way", KEEPS)
def test_gradients_that_code_keeps_stay_as_they_are(way: str, bucket_cap_mb: float, shard: int) -> None:
    model = chain()
    optimizer = wrap(model, bucket_cap_mb=bucket_cap_mb, shard=shard)
    kept, copies, keep = [], [], KEEPS[way]
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, 2 * step + part).backward()
            if part == 0:  # one pass per task, as for gradient surgery
                kept += [keep(parameter.grad) for parameter in model.parameters()]
                copies += [keep(parameter.grad).clone() for parameter in model.parameters()]
                model.zero_grad()
        optimizer.step()
        kept += [keep(parameter.grad) for parameter in model.parameters()]
        copies += [keep(parameter.grad).clone() for parameter in model.parameters()]
    assert all(map(torch.equal, kept, copies))
