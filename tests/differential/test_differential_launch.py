"""Some random programs in parts of a layer, and loops of trainers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("ranks", "tensor", "seed"), [(4, 2, 100)])
def test_random_programs_in_parts(ranks: int, tensor: int, seed: int) -> None:
    run = [sys.executable, str(Path(__file__).with_name("run.py")), "--programs", "3", "--seed", str(seed)]
    job = subprocess.run(
        [*run, "--np", str(ranks), "--tensor", str(tensor)], capture_output=True, text=True, timeout=400
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "3 core programs" in job.stdout


@pytest.mark.parametrize(
    ("kind", "needs", "seed"), [("lightning", "lightning", 24), ("transformers", "accelerate", 300)]
)
def test_random_loops(kind: str, needs: str, seed: int) -> None:
    pytest.importorskip(
        needs, reason=f"{needs} is not installed: pip install -r install/requirements-tests.txt"
    )
    run = [sys.executable, str(Path(__file__).with_name("run.py")), "--kind", kind]
    job = subprocess.run(
        [*run, "--programs", "8", "--seed", str(seed)], capture_output=True, text=True, timeout=400
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"8 {kind} programs" in job.stdout
