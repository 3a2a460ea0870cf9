"""``python -m benchmarks faults``: fault plans, growth, checks of snapshots, sums over results, and a short run of the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from snapshot_files import state_of

from benchmarks.case import Case
from benchmarks.suites.faults import faults
from benchmarks.worker import MeasuredJob
from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.random_state import random_state
from hvd_ckpt.snapshots.writer import SnapshotWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults.checks import differences, newest_good, unreadable
from faults.job import MARK, marked, rank_of
from faults.kill import Killed, draw_plan
from faults.run import measure
from faults.save import SaveKill, SaveTest
from faults.soak import Growth, Soaked, growth

KILL = {"who": "rank 1", "signal": "SIGKILL", "when": "step", "step": 7, "snapshot": 6, "writing": True}


def test_a_seed_is_always_the_same_run_and_seeds_cover_what_can_happen() -> None:
    drawn = [draw_plan(seed, 4, "gloo", 60) for seed in range(300)]
    assert drawn == [draw_plan(seed, 4, "gloo", 60) for seed in range(300)]
    kills = [kill for one in drawn for kill in one.kills]
    assert {kill.who for kill in kills} == {"all ranks", "launcher", "rank 0", "rank 1", "rank 2", "rank 3"}
    assert {kill.signal for kill in kills} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert sum(kill.signal == "SIGKILL" for kill in kills) > 0.6 * len(kills)
    assert {kill.when for kill in kills} == {"step", "snapshot", "start"}
    for one in drawn:
        steps = [kill.at for kill in one.kills if kill.when != "start"]
        assert steps == sorted(set(steps)) and all(0 < step < 60 for step in steps)
        assert all(int(kill.who[5:]) < one.size for kill in one.kills if kill.who.startswith("rank "))


def grown(measure: str, values: list[float]) -> Growth:
    return growth("rank 0", measure, [5.0 * number for number in range(len(values))], values)


def test_growth_is_told_from_what_comes_and_goes() -> None:
    start = [0.0] * 12  # the first fifth does not count
    leaking = grown("own MiB", start + [100 + number / 10 for number in range(48)])
    assert not leaking.flat and leaking.per_hour == pytest.approx(72)
    assert grown("own MiB", start + [1000 + number / 10 for number in range(48)]).flat, (
        "less than one per cent"
    )
    assert grown("own MiB", start + [100 - number for number in range(48)]).flat
    steady = grown("descriptors", [20, 23] * 30)
    assert steady.flat and (steady.first, steady.last, steady.mean) == (21.5, 21.5, 21.5)
    opening = grown("descriptors", [20 + number // 10 for number in range(60)])
    assert not opening.flat
    assert Soaked([steady], 400, 20, 1800.0).sound
    assert not Soaked([steady, opening], 400, 20, 1800.0).sound
    assert not Soaked([steady], failure="the run ended by itself").sound
    assert [line.endswith("not flat") for line in Soaked([steady, opening]).remarks] == [False, False, True]


def found(engine: str, folder: Path, **sizes: Any) -> dict[str, Any]:
    case = Case("ranks", engine, sizes={**faults.sizes["ranks"], **sizes})
    (figures,) = measure(MeasuredJob(folder / "job", 1, (case,), (), "", 0.0, False, 0, 1, False, 2, "cpu"))
    return figures


def test_every_fault_is_told_and_makes_the_result_unsound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value, told in (
        ("differences", [], ""),
        ("differences", ["weights.0"], "differs: weights.0"),
        ("unreadable", ["The snapshot 's' cannot be used."], "The snapshot 's'"),
        ("lost", 1, "1 committed steps lost"),
        ("left", 2, "2 processes left"),
        ("failure", "launch 1: no end after 9 s", "no end"),
    ):
        killed = Killed([KILL], restarts=1, **{"differences": None if name == "failure" else [], name: value})
        monkeypatch.setattr("faults.run.kill_run", lambda *given, killed=killed: killed)
        figures = found("kill", tmp_path)
        assert figures["right_count"] == (not told) and told in "\n".join(figures["remarks"])
        assert not told or figures["remarks"][0].startswith("seed 3: ")
    for fault in (None, "it is gone"):
        kill = SaveKill(3, 4, "background", "files being written", 0.1, 5, 4, fault)
        monkeypatch.setattr(SaveTest, "kill", lambda self, number, kill=kill: kill)
        figures = found("save", tmp_path / str(fault), saves=2)
        assert (figures["count"], figures["right_count"]) == (2, 0 if fault else 2)
        assert len(figures["remarks"]) == (2 if fault else 0)


def written(run: Path, step: int, weight: float, loss: float = 1.0) -> Path:
    import torch

    common = {
        "options": [torch.tensor(1.0)],
        "scaler": None,
        "progress": {"step": step},
        "plan": None,
        "samples": 9,
    }
    own = {"random": random_state(), "logged": (0.0, 0.0)}
    (run / "log.jsonl").parent.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text(json.dumps({"step": step, "kind": "train", "loss": loss}) + "\n")
    weights = {"a": torch.tensor([1.0, weight])}
    with SnapshotWriter(
        run / "snapshots", 9, Participant(0, 1, "0" * 8), pytest.fail, blocking=True
    ) as writer:
        writer.begin(step, state_of(weights, common, own))
        path = writer.wait()
    assert path is not None
    return path


def test_runs_are_the_same_to_the_last_bit_or_what_differs_is_named(tmp_path: Path) -> None:
    ours, same, zero, other_loss = (tmp_path / name for name in ("ours", "same", "zero", "loss"))
    for run, weight, loss in ((ours, 0.0, 1.0), (same, 0.0, 1.0), (zero, -0.0, 1.0), (other_loss, 0.0, 2.0)):
        written(run, 3, weight, loss)
    assert differences(ours, same, 3, 1) == []
    assert differences(ours, zero, 3, 1) == ["weights.a"], "0 and -0 are equal and not the same"
    assert differences(ours, other_loss, 3, 1) == ["the loss of step 3 in the log"]
    newer = written(ours, 6, 0.0)
    assert newest_good(ours) == 6 and unreadable(ours, 1) == []
    (newer / "rank-00000.safetensors").write_bytes(bytes((newer / "rank-00000.safetensors").stat().st_size))
    assert newest_good(ours) == 3
    (fault,) = unreadable(ours, 1)
    assert "step-00000006" in fault and "rank-00000.safetensors" in fault


def test_processes_are_found_by_their_mark_with_any_parent() -> None:
    token = f"test-{os.getpid()}"
    environment = {**os.environ, MARK: token, "HOROVOD_RANK": "3"}
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & exit 0"], env=environment)  # leaves an orphan
    parent.wait()
    deadline = time.monotonic() + 20
    while (found := [(rank_of(one), one.name()) for one in marked(token)]) != [(3, "sleep")]:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)  # the orphan is still called sh until it has become sleep
    for process in marked(token):
        process.kill()
        psutil.wait_procs([process], timeout=20)
    assert marked(token) == []
