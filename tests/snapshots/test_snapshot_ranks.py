"""Snapshots written by several ranks: each rank's part is its own, and a failure on one is a failure on all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_ckpt as hc
from hvd_ckpt.snapshots import snapshot, snapshot_write
from hvd_ckpt.snapshots.snapshot import SnapshotError

pytestmark = pytest.mark.ranks(gloo=(1, 2, 4), mpi=(2,))


def own_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "tensor": torch.arange(4.0) * rank, "random": snapshot.random_state()}


def write(folder: Path, step: int, **changes: Any) -> Path:
    arguments = {
        "weights": {"a": torch.full((3,), hc.rank())},
        "common": {"written by": hc.rank()},
        "own": own_of(hc.rank()),
    }
    return snapshot.write(folder, step, **{**arguments, **changes})


def test_every_rank_gets_its_own_part_back(folder: Path) -> None:
    torch.manual_seed(hc.rank())
    path = write(folder / "snapshots", 3)
    drawn = torch.rand(3)
    assert path == folder / "snapshots" / "step-00000003" == snapshot.find(folder / "snapshots")
    found = snapshot.read(path)
    assert (found.step, found.ranks, found.common) == (3, hc.size(), {"written by": 0})
    assert found.weights["a"].tolist() == [0, 0, 0]
    assert found.own["rank"] == hc.rank() and torch.equal(found.own["tensor"], torch.arange(4.0) * hc.rank())
    snapshot.set_random_state(found.own["random"])
    assert torch.equal(torch.rand(3), drawn)
    for rank in range(hc.size()):
        assert snapshot.read(path, rank).own["rank"] == rank
    more = snapshot.read(path, hc.size())
    assert more.own is None and more.weights["a"].tolist() == [0, 0, 0]


def test_a_damaged_part_of_any_rank_is_found(folder: Path) -> None:
    for step in (1, 2):
        path = write(folder, step)
    if hc.rank() == 0:
        part = path / f"rank-{hc.size() - 1:05d}.safetensors"
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    hc.barrier()
    with pytest.warns(
        UserWarning, match=f"step-00000002' cannot be used: rank-{hc.size() - 1:05d}.safetensors"
    ):
        assert snapshot.find(folder) == folder / "step-00000001"


def test_a_failure_on_one_rank_is_one_on_all(folder: Path) -> None:
    before = write(folder, 1)
    last = hc.size() - 1
    faulty: list[tuple[dict[str, Any], str]] = [
        ({"own": {"a": [object()]}}, rf"rank {last}: own\.a\[0\] is a builtins.object"),
        ({"step": 3}, f"rank {last}: step is 3 here and 2 on rank 0"),
        (
            {"folder": folder / "elsewhere"},
            f"rank {last}: .*which rank 0 made, is not there on host .*all hosts share",
        ),
    ]
    for changes, says in faulty[: 3 if last else 1]:
        arguments = {"folder": folder, "step": 2, **(changes if hc.rank() == last else {})}
        with pytest.raises(SnapshotError, match=f"The snapshot of step 2 was not written to .*{says}"):
            write(**arguments)
        if hc.rank() == 0:
            assert list(folder.iterdir()) == [before]
    with pytest.raises(SnapshotError, match="rank 0: step is -1"):
        write(folder, -1)
    assert snapshot.read(write(folder, 2)).step == 2


def test_parts_on_other_disks_are_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rank 0 saw a folder of the same name on a disk of its own."""
    if hc.rank() == hc.size() - 1:
        written = snapshot_write._write_part

        def elsewhere(temporary: Path, *arguments: Any) -> Any:
            disk = Path(tempfile.mkdtemp(dir=folder))
            (disk / temporary.name).mkdir()
            return written(disk / temporary.name, *arguments)

        monkeypatch.setattr(snapshot_write, "_write_part", elsewhere)
    with pytest.raises(
        SnapshotError, match=f"rank {hc.size() - 1} on host .* and rank 0 on host .* does not see it"
    ):
        write(folder, 1)
    assert snapshot.newest(folder) is None
