"""Evidence from whole jobs: once per step by Horovod's own timeline, the same bits in ten runs; more: parallel/test_evidence.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from controllers import HOROVODRUN, probe

pytestmark = pytest.mark.launch

SCRIPTS = Path(__file__).resolve().parents[1] / "helpers" / "scripts"
CONTROLLERS = pytest.mark.parametrize("controller", ["gloo", "mpi"])


def launch(ranks: int, controller: str, *command: str, **environment: str) -> str:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    result = subprocess.run(
        [*HOROVODRUN, "-np", str(ranks), f"--{controller}", sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", **environment},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def hashes_of(output: str) -> list[str]:
    line = re.search(r"HASHES (.*)", output)
    assert line is not None, output
    assert "RANKS-EQUAL True" in output, output
    return line.group(1).split()


def test_ten_runs_end_in_one_hash() -> None:
    """Five in each of two jobs."""
    command = (str(SCRIPTS / "hard_graph.py"), "hvd_ckpt", *["reentrant"] * 5)
    ours = [*hashes_of(launch(4, "gloo", *command)), *hashes_of(launch(4, "gloo", *command))]
    assert len(ours) == 10 and len(set(ours)) == 1, ours


@CONTROLLERS
def test_each_bucket_is_reduced_once_per_step(controller: str, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    output = launch(2, controller, str(SCRIPTS / "timeline.py"), HOROVOD_TIMELINE=str(timeline))
    found = re.search(r"STEPS (\d+) BUCKETS (\d+)", output)
    assert found is not None, output
    steps, buckets = int(found.group(1)), int(found.group(2))
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    named = [event for event in events if event.get("name") == "process_name" and "name" in event["args"]]
    names = {event["pid"]: event["args"]["name"] for event in named}
    started = [event for event in events if event.get("ph") == "B" and event.get("name") == "ALLREDUCE"]
    reduced = Counter(names[event["pid"]] for event in started)
    ours = {name: count for name, count in reduced.items() if ".bucket." in name}
    assert len(ours) == buckets > 3
    assert set(ours.values()) == {steps}
