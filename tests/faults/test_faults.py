"""Fault plans, growth, checks of snapshots, and what is told of a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from notes import Note
from snapshot_files import state_of

from hvd_ckpt.snapshots.barrier import Participant
from hvd_ckpt.snapshots.random_state import random_state
from hvd_ckpt.snapshots.writer import SnapshotWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faults import kill, save
from faults.checks import differences, newest_good, unreadable
from faults.job import MARK, marked, rank_of
from faults.kill import Killed
from faults.save import SaveKill, SaveTest
from faults.soak import Growth, Soaked, growth

KILL = {"who": "rank 1", "signal": "SIGKILL", "when": "step", "step": 7, "snapshot": 6, "writing": True}


def test_a_seed_is_always_the_same_run_and_seeds_cover_what_can_happen() -> None:
    drawn = [kill.draw(seed, 4, "gloo") for seed in range(300)]
    assert drawn == [kill.draw(seed, 4, "gloo") for seed in range(300)]
    assert {one.layout for one in drawn} == set(kill.LAYOUTS)
    kills = [each for one in drawn for each in one.kills]
    assert {each.who for each in kills} == {"all ranks", "launcher", "rank 0", "rank 1", "rank 2", "rank 3"}
    assert {each.signal for each in kills} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert sum(each.signal == "SIGKILL" for each in kills) > 0.6 * len(kills)
    assert {each.when for each in kills} == {"step", "snapshot", "start"}
    for one in drawn:
        steps = [each.at for each in one.kills if each.when != "start"]
        most = kill.ELASTIC_STEPS if one.layout == "elastic" else kill.STEPS
        assert steps == sorted(set(steps)) and all(0 < step < most for step in steps)
        assert all(int(each.who[5:]) < one.size for each in one.kills if each.who.startswith("rank "))


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


def test_every_fault_is_told_and_makes_the_result_unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = kill.draw(3, 2, "gloo")
    for name, value, told in (
        ("differences", [], ""),
        ("differences", ["weights.0"], "differs: weights.0"),
        ("unreadable", ["The snapshot 's' cannot be used."], "The snapshot 's'"),
        ("lost", 1, "1 committed steps lost"),
        ("left", 2, "2 processes left"),
        ("failure", "launch 1: no end after 9 s", "no end"),
    ):
        killed = Killed([KILL], restarts=1, **{"differences": None if name == "failure" else [], name: value})
        monkeypatch.setattr("faults.kill.kill_run", lambda *given, killed=killed: killed)
        *faults, note = kill.check(plan)
        assert isinstance(note, Note) and "1 kills, 1 of them" in note
        assert killed.sound == (not told) and len(faults) == bool(told) and told in "".join(faults)
    for fault in (None, "it is gone"):
        kills = SaveKill(3, 4, "background", "files being written", 0.1, 5, 4, fault)
        monkeypatch.setattr(SaveTest, "kill", lambda self, number, kills=kills: kills)
        *faults, note = save.check(3)
        assert len(faults) == (save.SERIES if fault else 0) and isinstance(note, Note)


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
