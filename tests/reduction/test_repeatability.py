"""Whole jobs end in the same bits: those that are repeated, and with logical replicas those of other numbers of ranks."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
from controllers import SCRIPTS, probe, run_ranks

pytestmark = pytest.mark.launch

HARD_GRAPH = SCRIPTS / "hard_graph.py"


def launch(**environment: str) -> tuple[int, list[str]]:
    """The number of buckets and the hashes of five runs in a job of three ranks: the fewest whose sums depend on their order."""
    status, output = run_ranks(3, HARD_GRAPH, "5", **environment)
    found = re.search(r"BUCKETS (\d+)\n.*HASHES (.*)", output)
    assert status == 0 and found is not None, output
    return int(found[1]), found[2].split()


def test_ten_runs_in_two_jobs_end_in_one_hash_and_reduce_each_bucket_once_per_step(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    buckets, hashes = launch(HOROVOD_TIMELINE=str(timeline))
    hashes += launch()[1]
    assert len(hashes) == 10 and len(set(hashes)) == 1, hashes
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {one["pid"]: one["args"].get("name") for one in events if one.get("name") == "process_name"}
    started = [one["pid"] for one in events if one.get("ph") == "B" and one.get("name") == "ALLREDUCE"]
    counts = [count for pid, count in Counter(started).items() if ".bucket." in names[pid]]
    assert len(counts) == buckets > 15
    assert set(counts) == {runpy.run_path(str(HARD_GRAPH))["STEPS"]}


def hashes(ranks: int, controller: str, mode: str, folder: Path) -> dict[str, str]:
    arguments = ("4", mode, str(folder))
    status, output = run_ranks(ranks, SCRIPTS / "replicas.py", *arguments, controller=controller)
    assert status == 0, output
    return json.loads((folder / "hashes.json").read_text())


def test_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = hashes(1, "gloo", "save", tmp_path)
    assert len(expected) == len(set(expected.values()))
    assert hashes(2, "gloo", "save", tmp_path) == expected
    assert hashes(4, "mpi" if probe("mpi").works else "gloo", "resume", tmp_path) == expected
