"""``hvd-ckpt bench faults`` in short: a killed run, two kills within a save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.faults.kill import FaultPlan, Kill

pytestmark = pytest.mark.launch


def test_a_killed_run_ends_as_the_undisturbed_one_and_killed_saves_leave_a_good_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = Kill("all ranks", "SIGKILL", "step", 20, 0.0)
    monkeypatch.setattr(
        "hvd_ckpt.bench.faults.kill.draw_plan", lambda seed, *_: FaultPlan(seed, 1, "gloo", (kill,))
    )
    output, file = tmp_path / "out", tmp_path / "results.jsonl"
    arguments = ["faults", "--np", "1", "--seed", "8", "--runs", "1", "--saves", "2", "--add", str(file)]
    result = CliRunner().invoke(bench, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads((output / "results.json").read_text())["results"]
    (run,) = report["kill"]["found"]
    assert (run["seed"], run["restarts"], run["differences"], run["lost"], run["left"]) == (8, 1, [], 0, 0)
    assert [one["signal"] for one in run["kills"]] == ["SIGKILL"]
    saves = report["save"]["found"]
    assert [one["fault"] for one in saves] == [None] * 2
    assert {one["writer"] for one in saves} == {"blocking", "background"}
    assert len(file.read_text().splitlines()) == 3
    assert "1 of 1 runs" in result.output and "2 of 2 kills" in result.output
