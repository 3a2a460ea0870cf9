"""The loop with logical replicas ends in the same bits on one rank, on two, and stopped on two and resumed on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "own_loop_replicas.py"


def test_the_weights_do_not_depend_on_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))

    def weights(ranks: int, *arguments: str) -> str:
        launcher = [horovodrun, "--gloo", "-np", str(ranks)] if ranks > 1 else []
        command = [*launcher, sys.executable, str(SCRIPT), "--epochs", "1", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, cwd=tmp_path)
        (line,) = re.findall(r"step \d+: weights \w+", ran.stdout)
        return line

    whole = weights(1, "--folder", "one")
    assert weights(2, "--folder", "two", "--until", "10") != whole
    assert weights(1, "--folder", "two") == whole
