"""``hvd-ckpt train --replicas``: the same snapshots and losses on any number of ranks, also resumed on another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from controllers import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults.checks import differences

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "train_runs.py"
STEPS, STOPPED = 4, 2
TOKENS = ["--sequence-length=16", "--model-option=width=16", "--model-option=heads=2", "--batch=2"]
RUNS = {
    "gpt-tiny": [*TOKENS, "--clip=0.5", "--model-option=dropout=0.1", "--segments=2,reentrant=true", "--precision=fp16"],
    "bert-tiny": [*TOKENS, "--budget=min", "--shard=gradients", "--accumulate=2", "--ema=0.9"],
    "resnet-20": ["--pixels=8", "--batch=4", "--batch-norm=deferred", "--accumulate=2", "--optimizer=sgd"],
}  # fmt: skip


def train(folder: Path, job: str, ranks: int, resumes: str = "") -> None:
    """Trains all models on so many ranks, and once more from the middle of another job's runs."""
    (folder / job).mkdir()
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 60)
    common = [f"--steps={STEPS}", f"--snapshot-every={STOPPED}", "--keep-snapshots=9", "--replicas=4", "--log-every=1"]  # fmt: skip
    common += ["--eval-every=2", "--eval-batches=1"]
    runs = []
    for name, own in RUNS.items():
        text = [f"--data=text:{folder / 'text.txt'}"] if own[:1] == TOKENS[:1] else []
        output = f"--output={folder / job / name}"
        runs.append({"arguments": [f"--model={name}", *common, *own, *text, output]})
        if resumes:
            copy = str(folder / job / f"{name}-resumed")
            copied = {"copy": [str(folder / resumes / name), copy], "step": STOPPED, "steps": STEPS}
            runs.append({**copied, "arguments": [f"--resume={copy}"]})
    (folder / f"{job}.json").write_text(json.dumps(runs), "utf-8")
    status, output = run_ranks(ranks, SCRIPT, "1", str(folder / f"{job}.json"))
    assert status == 0, output


def test_runs_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    train(tmp_path, "one", 1)
    train(tmp_path, "four", 4, resumes="one")
    for name in RUNS:
        one, four = tmp_path / "one" / name, tmp_path / "four" / name
        # A plan has measured seconds; the two recompute different calls, and come to the same.
        assert [name for name in differences(four, one, STEPS, None) if name != "plan"] == []
        # Its log has the steps from the middle on.
        resumed = differences(Path(f"{four}-resumed"), one, STEPS, None)
        assert [name for name in resumed if name != "plan"] == ["the steps in the log"]
