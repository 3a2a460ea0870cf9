"""``hvd-ckpt train --shard`` and ``hvd-ckpt consolidate`` as their user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.launch

BIN = Path(sys.executable).parent


def launch(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = [str(BIN / "horovodrun"), "-np", str(ranks), "--gloo"] if ranks > 1 else []
    return subprocess.run(
        [*launcher, str(BIN / "hvd-ckpt"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_ranks_share_out_what_one_goes_on_with_at_another_stage(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    run, offloaded = tmp_path / "run", tmp_path / "offloaded"
    offloaded.mkdir()
    model = ["--model", "gpt-tiny", *(f"--model-option={one}" for one in ("width=32", "layers=2", "heads=2"))]
    data = ["--text", str(tmp_path / "text.txt"), "--sequence-length", "16", "--batch", "2", "--steps", "2"]
    split = ["--shard", "2", "--offload", "optimizer", "--offload-folder", str(offloaded), "--wire", "int8"]
    first = launch("train", *model, *data, *split, "--budget", "min", "--output", str(run), ranks=2)
    assert first.returncode == 0, first.stdout + first.stderr
    assert not list(offloaded.iterdir())

    again = launch("train", "--resume", str(run), "--shard", "3", "--offload", "none", "--steps", "3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"done after 3 steps: {run}" in again.stdout

    for step, ranks in ((2, "2 ranks"), (3, "1 rank")):
        file = tmp_path / f"{step}.safetensors"
        found = launch("consolidate", str(run / "snapshots" / f"step-0000000{step}"), "--output", str(file))
        assert found.returncode == 0 and f"of step {step}, written by {ranks}, " in found.stdout, found.stderr
    before, after = (load_file(tmp_path / f"{step}.safetensors") for step in (2, 3))
    assert {name: one.shape for name, one in before.items()} == {
        name: one.shape for name, one in after.items()
    }
    changed = [name for name, one in before.items() if not one.equal(after[name])]
    assert changed and all((before[name] - after[name]).abs().max() < 1e-2 for name in changed)
