"""``hvd-ckpt bench faults`` as its user runs it, in short: a killed run, four kills within a save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch


def test_killed_runs_end_as_the_undisturbed_one_and_killed_saves_leave_a_good_snapshot(
    tmp_path: Path,
) -> None:
    output, file = tmp_path / "out", tmp_path / "results.jsonl"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "hvd_ckpt.cli.main", "bench", "faults", "--np", "2", "--seed", "8"),
            *("--runs", "1", "--saves", "4", "--add", str(file), "--output", str(output)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads((output / "results.json").read_text())["results"]
    runs = report["kill"]["found"]
    assert [run["seed"] for run in runs] == [8]
    assert all(run["differences"] == [] and run["lost"] == run["left"] == 0 for run in runs)
    kills = [kill for run in runs for kill in run["kills"]]
    assert kills and all(kill["signal"] in ("SIGKILL", "SIGTERM", "SIGINT") for kill in kills)
    saves = report["save"]["found"]
    assert [kill["fault"] for kill in saves] == [None] * 4
    assert {kill["writer"] for kill in saves} == {"blocking", "background"}
    assert len(file.read_text().splitlines()) == 5
    for text in (process.stdout, (output / "report.md").read_text()):
        for words in ("1 of 1 runs (1 at np=2) end as the undisturbed run", "4 of 4 kills", "machine: "):
            assert words in text
