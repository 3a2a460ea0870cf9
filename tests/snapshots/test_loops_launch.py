"""Tests of the example's loop: killed and resumed, it ends in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from controllers import SCRIPTS, run_ranks
from snapshot_files import found_in

from hvd_ckpt.snapshots import reader

pytestmark = pytest.mark.launch


def train(folder: Path, killed_in: int) -> int:
    arguments = ("--folder", str(folder), "--epochs", "1", "--save-every", "10", str(killed_in))
    status, output = run_ranks(2, SCRIPTS / "own_loop.py", *arguments)
    assert (status == 0) == (killed_in == 0), output
    return status


def test_a_killed_loop_resumes_in_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "whole", 0)
    train(tmp_path / "run", 25)
    newest = found_in(tmp_path / "run" / "snapshots")
    assert newest is not None and newest.name in ("step-00000010", "step-00000020")
    train(tmp_path / "run", 0)
    for rank in (0, 1):
        one, other = (
            reader.read(tmp_path / name / "snapshots" / "step-00000056", rank) for name in ("whole", "run")
        )
        assert list(one.weights) == list(other.weights)
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
        assert torch.equal(one.per_rank["random"]["torch"], other.per_rank["random"]["torch"])
