"""Fault plans, growth, checks of snapshots, and what is told of a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from snapshot_files import write

from hvd_ckpt.snapshots.training_state import random_state

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults.checks import differences, newest_good, unreadable


def written(run: Path, step: int, weight: float, loss: float = 1.0) -> Path:
    common = {"options": [torch.tensor(1.0)], "scaler": None, "progress": {"step": step}}
    common |= {"plan": None, "samples": 9, "logged": [(0.0, 0.0)]}
    own = {"random": random_state()}
    run.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text(json.dumps({"step": step, "kind": "train", "loss": loss}) + "\n")
    return write(run / "snapshots", step, common, own, {"a": torch.tensor([1.0, weight])})


def test_runs_are_the_same_to_the_last_bit_or_what_differs_is_named(tmp_path: Path) -> None:
    ours, same, zero, other_loss = (tmp_path / name for name in ("ours", "same", "zero", "loss"))
    for run, weight, loss in ((ours, 0.0, 1.0), (same, 0.0, 1.0), (zero, -0.0, 1.0), (other_loss, 0.0, 2.0)):
        written(run, 3, weight, loss)
    assert differences(ours, same, 3, 1) == []
    assert differences(ours, zero, 3, 1) == ["weights/a"], "0 and -0 are equal and not the same"
    assert differences(ours, other_loss, 3, 1) == ["losses.3"]
    newer = written(ours, 6, 0.0)
    assert newest_good(ours) == 6 and unreadable(ours, 1) == []
    (newer / "rank-00000.safetensors").write_bytes(bytes((newer / "rank-00000.safetensors").stat().st_size))
    assert newest_good(ours) == 3
    (fault,) = unreadable(ours, 1)
    assert "step-00000006" in fault and "rank-00000.safetensors" in fault
