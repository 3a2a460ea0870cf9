"""``hvd-ckpt bench replicas`` in short: runs of the training command end in the same bits on 1 and 4 ranks, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench

pytestmark = pytest.mark.launch


def test_one_hash_on_any_number_of_ranks(tmp_path: Path) -> None:
    words = [
        "replicas",
        "--quick",
        "--np",
        "1,4",
        "--controllers",
        "gloo",
        "--curves",
        "2",
        "--output",
        str(tmp_path / "report"),
    ]
    result = CliRunner().invoke(bench, words)  # over MPI: tests/reduction/test_replicas_launch.py
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report" / "results.json").read_text())
    *_, ours = report["losses"].values()
    assert len(report["losses"]) == 2 and ours["1"] == ours["4"] and len(ours["1"]) == 2
    found = report["results"]
    assert all(one["one"] and len(one["hashes"]) >= 3 for one in found)
    assert len({one["hashes"][0] for one in found}) == len(found) == 2
    assert found[0]["skipped_steps"][0] > 0  # where the loss scale found an overflow
