"""A rank that is killed: the resumed run ends with the weights of one that was not killed, on ranks, stages and replicas."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from controllers import run_ranks

from hvd_ckpt.snapshots.reader import read

pytestmark = pytest.mark.launch

PROGRAM = Path(sys.executable).parent / "hvd-ckpt"
STEPS, EVERY = 60, 10
MODEL = ["width=32", "layers=2", "heads=2", "dropout=0.1", "tied=false"]
SETTINGS = ["--model=gpt-tiny", *(f"--model-option={option}" for option in MODEL), "--log-every=1000"]
SETTINGS += ["--sequence-length=16", "--batch=4", f"--steps={STEPS}", f"--snapshot-every={EVERY}"]
KILLING = """
import os, signal

class Kill:
    def on_snapshot(self, path):
        if path.name == "step-00000020":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("stages", "replicas"), [(1, None), (2, None), (1, 4)])
def test_a_rank_that_is_killed_changes_nothing(
    stages: int, replicas: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, and replicas on two ranks, end as one rank does."""
    monkeypatch.chdir(tmp_path)
    Path("kill.py").write_text(KILLING)
    Path("text.txt").write_bytes(bytes(range(32, 127)) * 40)
    settings = [*SETTINGS, "--data=text:text.txt", f"--accumulate={stages}"]
    settings += [] if replicas is None else [f"--replicas={replicas}"]
    alone = 2 // stages if replicas is None else 1
    status, said = run_ranks(alone, PROGRAM, "train", *settings, "--output=undisturbed")
    assert status == 0, said
    more = [f"--pipeline={stages}", "--callback=kill:Kill", "--output=run"]
    status, said = run_ranks(2, PROGRAM, "train", *settings, *more)
    assert status != 0 and "done after" not in said
    Path("kill.py").write_text("class Kill:\n    def on_end(self, outcome): pass\n")
    status, said = run_ranks(2, PROGRAM, "train", "--resume=run")
    assert status == 0 and "resumes after step " in said, said
    last = Path("snapshots") / f"step-{STEPS:08d}"
    weights, expected = read(Path("run", last)).weights, read(Path("undisturbed", last)).weights
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)
