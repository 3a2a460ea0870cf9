"""Snapshots beside training by several ranks: training's collectives go on meanwhile, and a fault on one rank is told on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from snapshot_files import divided, read_snapshot, state_of

import hvd_ckpt as hc
from hvd_ckpt.snapshots.writer import Participant, SnapshotWriter

pytestmark = pytest.mark.ranks(gloo=(2, 4))


def test_ranks_write_while_they_train(folder: Path) -> None:
    told: list[str] = []
    last = hc.size() - 1
    weights = {"a": torch.zeros(100_000)}
    with SnapshotWriter(folder, 2, Participant(hc.rank(), hc.size(), "89abcdef"), told.append) as writer:
        for step in range(1, 5):
            faulty = step == 3 and hc.rank() == last
            per_rank = object() if faulty else {"rank": hc.rank(), "step": torch.full((9,), step)}
            state = state_of(weights, {"step": step}, per_rank)
            state.ranges = divided(state.ranges, hc.rank(), hc.size())
            writer.begin(step, state)
            update = hc.allreduce(torch.ones(100_000), name=f"update.{step}")
            writer.before_update()
            weights["a"] += update
        assert writer.wait() == (folder / "step-00000004" if hc.rank() == 0 else None)
    hc.barrier()
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000002", "step-00000004"]
    for step in (2, 4):
        found = read_snapshot(folder / f"step-0000000{step}")
        assert found.weights["a"].eq(step - 1).all() and found.replicated == {"step": step}
        assert found.per_rank["rank"] == hc.rank() and found.per_rank["step"].eq(step).all()
    assert len(told) == (hc.rank() == 0)
    assert told == [] or f"rank {last}: per_rank is a builtins.object" in told[0]
