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


def test_random_loops_of_lightning() -> None:
    pytest.importorskip(
        "lightning", reason="lightning is not installed: pip install -r install/requirements-tests.txt"
    )
    run = [sys.executable, str(Path(__file__).with_name("run.py")), "--kind", "lightning"]
    job = subprocess.run(
        [*run, "--programs", "8", "--seed", "24"], capture_output=True, text=True, timeout=400
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "8 lightning programs" in job.stdout
