"""Suites without ranks: cases, rows, ratios, counts of bytes; and all ways to recompute, which compute the same."""

from __future__ import annotations

import mmap
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.case import Case, MeasuredJob, Row
from benchmarks.probes import SeenMarks, storage_bytes
from benchmarks.quartiles import Quartiles
from benchmarks.suites.pipeline import of_ideal, pipeline
from benchmarks.suites.recompute import recompute
from benchmarks.suites.shard import STAGES, of_best_peer, shard
from benchmarks.worker import measure
from benchmarks.workloads import workload
from hvd_ckpt.utils.memory import recording_marks


def row(engine: str, *seconds: float, **at: Any) -> Row:
    return Row(Case("gpt", engine, at=at), list(seconds))


def settings(suite: Any, **chosen: Any) -> Any:
    words = {name: axis.values for name, axis in suite.axes.items()}
    places = {"np": (1, 2), "controller": ("gloo",), "workloads": ("gpt",), "engines": suite.engines}
    return SimpleNamespace(**{**words, **places, "quick": True, "set": None, **chosen})


def test_the_help_of_suites_does_not_wait_for_pytorch() -> None:
    code = "import sys; from benchmarks import suites; [*map(suites.find_suite, suites.names())]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_row_takes_the_slowest_rank_and_the_least_of_several_counts() -> None:
    alone, together = row("a"), row("b")
    ranks: list[dict[str, Any]] = [
        {"seconds": [1.0, 3.0, 2.0], "peak_bytes": 9, "loss": 1.0},
        {"seconds": [2.0, 1.0, 1.0], "peak_bytes": 7, "loss": 2.0},
    ]
    alone.add(ranks, statistics.median)
    alone.add([{"seconds": [4.0], "peak_bytes": 8}, {"seconds": [1.0], "peak_bytes": 8}], statistics.median)
    assert alone.seconds == [2.0, 4.0] and alone.over("peak_bytes") == 8 and alone.losses == [1.5]
    together.add([{"seconds": [1.0, 3.0]}, {"seconds": [2.0, 1.0], "failure": "RuntimeError: no"}])
    assert together.seconds == [2.0, 3.0] and together.failure == "RuntimeError: no" and together.step is None


def test_ratios_are_within_a_round_and_a_condition() -> None:
    # The machine is ten times as slow in the second round.
    ours, theirs = row("a", 1.0, 10.0, stage="2"), row("b", 2.0, 20.0, stage="2")
    assert ours.peer([ours, row("b", 1.0, stage="3"), theirs], "b") is theirs
    assert ours.ratio(theirs) == Quartiles(0.5, 0.5, 0.5)
    assert ours.ratio(None) is None


def test_stages_are_compared_with_the_fastest_peer_that_does_the_same() -> None:
    rows = [
        row("stage-2", 2.0, 3.0, 2.0, stage="2"),
        row("fsdp2-2", 4.0, 4.0, 4.0, stage="2"),
        row("deepspeed-2", 9.0, 9.0, 9.0, stage="2"),
        row("fsdp2-3", 1.0, 1.0, 1.0, stage="3"),
    ]
    assert of_best_peer(rows[0], rows) == Quartiles(0.5, 0.5, 0.625)
    assert of_best_peer(rows[1], rows) is None
    cases = list(shard.cases(settings(shard, wire=("fp32", "int8"), passes=("2",))))
    assert all(case.engine in STAGES[case.at["stage"]] for case in cases)
    in_int8 = {case.engine for case in cases if case.at["wire"] == "int8"}
    assert in_int8 == {"stage-2", "stage-3", "stage-3-offload"}
    (own,) = {case.at["stage"] for case in shard.cases(settings(shard, engines=("a:B",), stage=("2",)))}
    assert own == "2"


def test_pipelines_are_compared_with_what_the_schedule_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = row("unstaged", 9.0, schedule="1f1b")
    stages = Row(Case("gpt", "stages", 2, at={"schedule": "1f1b"}), [9.0 / (2 * 8 / 9)])
    assert of_ideal(stages, [whole, stages]) == Quartiles(1.0, 1.0, 1.0)
    assert of_ideal(whole, [whole, stages]) is None
    monkeypatch.setattr("benchmarks.suites.pipeline.balance", lambda *given: [given[-1]])
    cases = list(pipeline.cases(settings(pipeline)))
    assert [case.engine for case in cases if case.np == 1] == ["unstaged"]
    assert {case.options["balance"][0] for case in cases if case.np == 2} == {2}


def test_a_text_that_is_too_short_to_be_held_out_from_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a" * 16 * 512)
    with pytest.raises(ValueError, match="511 windows of 16 tokens, and 512 are held out"):
        workload("text", {"text": str(text), "length": 16}).draw(0, 0)


def test_each_storage_counts_once_and_mapped_files_do_not(tmp_path: Path) -> None:
    tensor, seen = torch.zeros(1000), set[int]()
    path = tmp_path / "state"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=torch.uint8)
    assert storage_bytes([tensor, tensor[:10], mapped], seen) == 4000
    assert storage_bytes([tensor.view(10, 100)], seen) == 0


def test_memory_that_unseen_threads_free_is_free_when_it_is_allocated_again() -> None:
    block = 1 << 22
    with recording_marks("cpu", SeenMarks) as marks:
        for _ in range(30):
            tensors = [torch.empty(block, dtype=torch.uint8)]
            thread = threading.Thread(target=tensors.clear)
            thread.start()
            thread.join()
        kept = torch.empty(block, dtype=torch.uint8)
        marks.mark("freed")
    # Some addresses have their turn.
    assert kept.nbytes <= marks.marks[0].bytes <= marks.marks[0].peak_bytes < 15 * block


def found(folder: Path, name: str, *engines: str) -> dict[str, dict[str, Any]]:
    """What a rank finds of these engines, each of which takes one timed step."""
    cases = tuple(Case(name, engine, 1, sizes=dict(recompute.quick_sizes[name])) for engine in engines)
    job = MeasuredJob(folder, 1, "recompute", cases, steps=1, seed=0, device="cpu")
    return dict(zip(engines, measure(job)))


def test_all_ways_compute_the_same(tmp_path: Path, one_thread: None, quick_planner: None) -> None:
    ways = ("sequential-2", "blocks", "blocks-2", "matmuls-saved", "half-saved", "plan-blocks", "plan-min")
    ranks = found(tmp_path, "gpt", "none", *ways)
    assert {way: rank.get("failure") for way, rank in ranks.items()} == dict.fromkeys(ranks)
    assert len({rank["hash"] for rank in ranks.values()}) == 1
    assert all(len(rank["seconds"]) == 1 for rank in ranks.values())
    peaks = {way: rank["step_bytes"] for way, rank in ranks.items()}
    assert peaks["plan-min"] <= peaks["plan-blocks"] <= peaks["blocks"] < peaks["blocks-2"] < peaks["none"]


def test_batch_norms_that_run_twice_are_found(tmp_path: Path, one_thread: None, quick_planner: None) -> None:
    ranks = found(tmp_path, "densenet", "none", "blocks", "layers", "plan-blocks")
    assert len({rank["hash"] for rank in ranks.values()}) == 1
    kept = ranks["none"]["buffer_hash"]
    alike = {way: rank["buffer_hash"] == kept for way, rank in ranks.items()}
    assert alike == {"none": True, "blocks": False, "layers": False, "plan-blocks": True}
