"""``python -m benchmarks faults`` in short: a run that is killed, and two processes that are killed within a save; and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks as bench

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults import resumes
from faults.kill import FaultPlan, Kill

pytestmark = pytest.mark.launch


def test_a_killed_run_ends_as_the_undisturbed_one_and_killed_saves_leave_a_good_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = Kill("all ranks", "SIGKILL", "step", 20, 0.0)
    monkeypatch.setattr("faults.kill.draw_plan", lambda seed, *_: FaultPlan(seed, 2, "gloo", (kill,)))
    options = ("--np", "2", "--controller", "gloo", "--rounds", "1", "--set", "seed=8,saves=2")
    result = CliRunner().invoke(bench, ["faults", *options, "--output", str(tmp_path / "report")])
    assert isinstance(result.exception, SystemExit | None), result.exception
    output, report = result.output, json.loads((tmp_path / "report" / "results.json").read_text())
    assert result.exit_code == 0, output
    killed, saves = report["results"]
    assert (killed["engine"], killed["kills"], killed["figures"]["right_count"]) == ("kill", 1, [1])
    assert (saves["engine"], saves["kills"], saves["figures"]["right_count"]) == ("save", 2, [2])
    assert "1 of 1" in output and "2 of 2" in output


def test_jobs_of_other_layouts_resume_with_the_same_bits(tmp_path: Path) -> None:
    assert resumes.run(1, 6, tmp_path / "cases") == 0
