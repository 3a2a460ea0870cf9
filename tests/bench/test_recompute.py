"""Tests of ``python -m benchmarks recompute`` on tiny models: all ways to recompute compute the same, and the peaks are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.case import Case, MeasuredJob
from benchmarks.engines.recompute import Recomputation
from benchmarks.suites.recompute import recompute
from benchmarks.worker import measure

pytestmark = pytest.mark.usefixtures("one_thread", "quick_planner")


class Broken(Recomputation):
    """A way that does not run."""

    def recomputing(self, model: Any) -> Any:
        raise RuntimeError("no\nnot today")


def found(folder: Path, name: str, *engines: str) -> dict[str, dict[str, Any]]:
    """What a rank finds of these engines, each of which takes one timed step."""
    cases = tuple(Case(name, engine, 1, sizes=dict(recompute.quick_sizes[name])) for engine in engines)
    job = MeasuredJob(folder, 1, "recompute", cases, steps=1, seed=0, device="cpu")
    return dict(zip(engines, measure(job)))


def test_all_ways_compute_the_same(tmp_path: Path) -> None:
    ways = ("sequential-2", "blocks", "blocks-2", "matmuls-saved", "half-saved", "plan-blocks", "plan-min")
    ranks = found(tmp_path, "gpt", "none", *ways, f"{__name__}:Broken")
    broken = ranks.pop(f"{__name__}:Broken")
    assert broken["failure"] == "RuntimeError: no" and not broken["seconds"]
    assert {way: rank.get("failure") for way, rank in ranks.items()} == dict.fromkeys(ranks)
    assert len({rank["hash"] for rank in ranks.values()}) == 1
    assert all(len(rank["seconds"]) == 1 for rank in ranks.values())
    peaks = {way: rank["step_bytes"] for way, rank in ranks.items()}
    assert peaks["plan-min"] <= peaks["plan-blocks"] <= peaks["blocks"] < peaks["blocks-2"] < peaks["none"]


def test_batch_norms_that_run_twice_are_found(tmp_path: Path) -> None:
    ranks = found(tmp_path, "densenet", "none", "blocks", "layers", "plan-blocks")
    assert len({rank["hash"] for rank in ranks.values()}) == 1
    buffers = {way: rank["buffer_hash"] for way, rank in ranks.items()}
    assert buffers["plan-blocks"] == buffers["none"] and buffers["none"] not in (
        buffers["blocks"],
        buffers["layers"],
    )
