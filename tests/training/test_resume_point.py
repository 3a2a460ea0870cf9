"""A commit, a snapshot in memory, is the same on every rank and stays as it was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hvd_ckpt as hc
from hvd_ckpt.snapshots.tensors import Staging
from hvd_ckpt.training.resume_point import MemoryCheckpoint, ResumePoint, broadcast_resume_point

pytestmark = pytest.mark.ranks(gloo=(1, 2), mpi=(4,))


def state(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, 5, 5, generator=generator)
    weights = {
        "weight": weight.to(memory_format=torch.channels_last),
        "tied": weight,
        "half": weight.bfloat16(),
        "count": torch.tensor(seed),
        "none": torch.empty(0, 7),
    }
    common = {"optimizer": {"state": {0: {"mean": weight + 1, "seen": weight > 0}}}, "lr": (seed, 0.5)}
    return weights, common


def taken(commit: MemoryCheckpoint) -> tuple[dict[str, Tensor], Any]:
    made = commit.snapshot()
    assert made.per_rank is None and made.step == commit.step
    return made.weights, made.replicated


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_every_rank_gets_what_rank_0_has() -> None:
    assert broadcast_resume_point(None) is None
    rank = hc.rank()
    place = Path(f"/run-{rank}")
    assert broadcast_resume_point(ResumePoint(place, place / "start")) == ResumePoint(
        Path("/run-0"), Path("/run-0/start")
    )
    theirs = ResumePoint(place, checkpoint=MemoryCheckpoint.take(rank, *state(rank), Staging()))
    for origin in (theirs, theirs if rank == 0 else None):  # of one that was there before, and of a new rank
        received = broadcast_resume_point(origin)
        assert received is not None and received.checkpoint is not None
        assert received.folder == Path("/run-0") and received.checkpoint.step == 0
        assert same(taken(received.checkpoint), state(0))


def test_a_commit_stays_as_it_was_taken() -> None:
    weights, common = state(1)
    memory = Staging()
    MemoryCheckpoint.take(6, *state(2), memory)
    commit = MemoryCheckpoint.take(7, weights, common, memory)
    weights["weight"].zero_()
    common["optimizer"]["state"][0]["mean"].zero_()
    common["optimizer"]["state"].clear()
    optimizer_keeps_it = taken(commit)[1]
    optimizer_keeps_it["optimizer"]["state"][0]["mean"].zero_()
    assert same(taken(commit), state(1))
