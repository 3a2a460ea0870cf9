"""Tests of the commands ``hvd-ckpt train --shard`` and ``hvd-ckpt export``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from controllers import HOROVODRUN
from safetensors.torch import load_file

from hvd_ckpt.app.cli.export import export

pytestmark = pytest.mark.launch

COMMAND = [str(Path(sys.executable).parent / "hvd-ckpt"), "train"]


def launch(command: list[str]) -> str:
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_run_sharded_over_two_ranks_resumes_on_one_rank_at_another_stage(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    run, offloaded = tmp_path / "run", tmp_path / "offloaded"
    offloaded.mkdir()
    model = ["--model", "gpt-tiny", *(f"--model-option={one}" for one in ("width=32", "layers=2", "heads=2"))]
    data = [f"--data=text:{tmp_path / 'text.txt'}", "--sequence-length=16", "--batch=2", "--steps=2"]
    split = ["--shard", f"2,offload=optimizer,folder={offloaded},wire=int8"]
    more = ["--budget", "min", "--output", str(run)]
    launch([*HOROVODRUN, "-np", "2", "--gloo", *COMMAND, *model, *data, *split, *more])
    assert not list(offloaded.iterdir())
    again = ["--resume", str(run), "--shard", "3", "--steps", "3"]
    assert f"done after 3 steps: {run}" in launch([*COMMAND, *again])

    weights = []
    for step, ranks in ((2, "2 ranks"), (3, "1 rank")):
        snapshot, file = str(run / "snapshots" / f"step-0000000{step}"), str(tmp_path / f"{step}.safetensors")
        found = CliRunner().invoke(export, [snapshot, "--output", file])
        assert found.exit_code == 0, found.output
        assert f"of step {step}, written by {ranks}, " in found.output
        weights.append(load_file(file))
    before, after = weights
    assert {name: one.shape for name, one in before.items()} == {
        name: one.shape for name, one in after.items()
    }
    changed = [name for name, one in before.items() if not one.equal(after[name])]
    assert changed and all((before[name] - after[name]).abs().max() < 1e-2 for name in changed)
