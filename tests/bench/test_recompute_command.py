"""``hvd-ckpt bench recompute`` on two ranks, as its user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch


def test_ranks_that_train_together_are_measured_and_get_the_same_result(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "hvd_ckpt.cli.main",
                "bench",
                "recompute",
                "--quick",
                "--np",
                "2",
                "--rounds",
                "1",
            ),
            *(
                "--workloads",
                "densenet",
                "--methods",
                "layers,ours",
                "--budgets",
                "0.57x",
                "--batches",
                "4",
            ),
            *("--output", str(tmp_path / "out")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (case,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert (case["ranks"], case["batch"], case["failure"]) == (2, 4, None)
    found = {one["name"]: one for one in (*case["entries"], *case["plans"])}
    assert all(one["failure"] is None and len(one["seconds"]) == 1 for one in found.values())
    different = {one["name"] for one in found.values() if one["same"] != "bitwise"}
    assert different == {"checkpoint in each layer", "checkpoint in each layer, reentrant"}
    keep, plan = found["no recomputation"], found["plan 0.57x"]
    assert plan["peak_bytes"] < 0.6 * keep["peak_bytes"]
    assert "densenet, 2 ranks, batch 4" in process.stdout
