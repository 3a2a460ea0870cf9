"""Snapshots beside training by several ranks: training's collectives go on meanwhile, and a fault on one rank is told on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.random_state import random_state, set_random_state
from hvd_ckpt.snapshots.writer import SnapshotWriter

pytestmark = pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2,))


def test_ranks_write_while_they_train(folder: Path) -> None:
    told: list[str] = []
    last = hc.size() - 1
    weights = {"a": torch.zeros(100_000)}
    with SnapshotWriter(folder, 2, "89abcdef", hc.rank(), hc.size(), told.append) as writer:
        for step in range(1, 5):
            faulty = step == 3 and hc.rank() == last
            per_rank = object() if faulty else {"rank": hc.rank(), "step": torch.full((9,), step)}
            writer.begin(step, weights=weights, replicated={"step": step}, per_rank=per_rank)
            update = hc.allreduce(torch.ones(100_000), name=f"update.{step}")
            writer.before_update()
            weights["a"] += update
        assert writer.wait() == (folder / "step-00000004" if hc.rank() == 0 else None)
    hc.barrier()
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000004"]
    for step in (2, 4):
        found = reader.read(folder / f"step-0000000{step}")
        assert found.weights["a"].eq(step - 1).all() and found.replicated == {"step": step}
        assert found.per_rank["rank"] == hc.rank() and found.per_rank["step"].eq(step).all()
    assert len(told) == (hc.rank() == 0)
    assert told == [] or f"rank {last}: per_rank is a builtins.object" in told[0]


def test_every_rank_gets_its_state_back_and_damage_of_any_is_found(folder: Path) -> None:
    torch.manual_seed(hc.rank())
    with SnapshotWriter(folder, 2, "01234567", hc.rank(), hc.size(), print, blocking=True) as writer:
        for step in (1, 2):
            writer.begin(
                step,
                weights={"a": torch.full((3,), hc.rank())},
                replicated={"written by": hc.rank()},
                per_rank={"rank": hc.rank(), "random": random_state()},
            )
    hc.barrier()
    drawn = torch.rand(3)
    path = folder / "step-00000002"
    found = reader.read(path)
    assert (found.step, found.ranks, found.replicated) == (2, hc.size(), {"written by": 0})
    assert found.weights["a"].tolist() == [0, 0, 0]
    set_random_state(found.per_rank["random"])
    assert torch.equal(torch.rand(3), drawn)
    assert [reader.read(path, rank).per_rank["rank"] for rank in range(hc.size())] == list(range(hc.size()))
    assert reader.read(path, hc.size()).per_rank is None
    hc.barrier()
    last = path / f"rank-{hc.size() - 1:05d}.pt"
    if hc.rank() == 0:
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)
    hc.barrier()
    with pytest.warns(UserWarning, match=f"step-00000002' cannot be used: {last.name}"):
        assert reader.find(folder) == folder / "step-00000001"
