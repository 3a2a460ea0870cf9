"""``hvd-ckpt bench faults`` without a job: what is drawn from seeds, how growth is told from noise, what results add up to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.faults.drawing import draw
from hvd_ckpt.bench.faults.fit import fit_line, without_start
from hvd_ckpt.bench.faults.judging import differences, newest_good, unreadable
from hvd_ckpt.bench.faults.kill import Killed
from hvd_ckpt.bench.faults.processes import MARK, end, marked
from hvd_ckpt.bench.faults.records import Records
from hvd_ckpt.bench.faults.report import Report, kill_section, save_section, soak_section, stall_section
from hvd_ckpt.bench.faults.save import SaveKill
from hvd_ckpt.bench.faults.soak import Soaked, Track
from hvd_ckpt.bench.faults.stall import StallRow
from hvd_ckpt.snapshots import snapshot

KILL = {"who": "rank 1", "signal": "SIGKILL", "when": "step", "step": 7, "snapshot": 6, "writing": True}


def test_a_seed_is_always_the_same_run_and_seeds_cover_what_can_happen() -> None:
    drawn = [draw(seed, (2, 4), ("gloo", "mpi"), 60) for seed in range(300)]
    assert drawn == [draw(seed, (2, 4), ("gloo", "mpi"), 60) for seed in range(300)]
    ranks = [(one.size, one.controller) for one in drawn]
    assert {pair: ranks.count(pair) for pair in ranks} == dict.fromkeys(
        [(2, "gloo"), (4, "gloo"), (2, "mpi"), (4, "mpi")], 75
    )
    kills = [kill for one in drawn for kill in one.kills]
    assert {kill.who for kill in kills} == {"all ranks", "launcher", "rank 0", "rank 1", "rank 2", "rank 3"}
    assert {kill.signal for kill in kills} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert sum(kill.signal == "SIGKILL" for kill in kills) > 0.6 * len(kills)
    assert {kill.when for kill in kills} == {"step", "snapshot", "start"}
    for one in drawn:
        steps = [kill.at for kill in one.kills if kill.when != "start"]
        assert steps == sorted(set(steps)) and all(0 < step < 60 for step in steps)
        assert all(int(kill.who[5:]) < one.size for kill in one.kills if kill.who.startswith("rank "))


def samples(growth: float, noise: float, plateau: int, seed: int) -> tuple[list[float], list[float]]:
    """30 minutes, every 5 seconds: MiB that grow by so much per hour, on plateaus of so many samples of random height."""
    draws = random.Random(seed)
    heights = [draws.gauss(0, noise) for _ in range(360 // plateau + 1)]
    times = [5.0 * number for number in range(360)]
    return times, [
        100 + growth * time / 3600 + heights[number // plateau] for number, time in enumerate(times)
    ]


def test_growth_is_told_from_plateaus() -> None:
    lines = [fit_line(*samples(0, 3, 20, seed)) for seed in range(100)]
    assert sum(line.flat for line in lines) >= 95, "plateaus of 3 MiB up and down are no growth"
    assert not any(fit_line(*samples(30, 1, 20, seed)).flat for seed in range(20)), "15 MiB in 30 minutes are"
    exact = fit_line([0, 3600, 7200], [10, 12, 14])
    assert (exact.mean, exact.slope, exact.growth) == (
        12,
        pytest.approx(2),
        pytest.approx(4),
    ) and not exact.flat
    assert fit_line([0, 3600, 7200], [1000, 1002, 1004]).flat, "less than one per cent"
    assert fit_line([0, 3600, 7200], [14, 12, 10]).flat, "what shrinks does not leak"
    assert without_start([0, 1, 2, 5, 10], [5, 4, 3, 2, 1]) == ([2, 5, 10], [3, 2, 1])
    with pytest.raises(ValueError, match="3 samples or more, there are 2"):
        fit_line([0, 1], [1, 1])


def track(descriptors: list[int]) -> Track:
    count = len(descriptors)
    times = [float(number) for number in range(count)]
    return Track("rank 0", times, [100.0] * count, [50.0] * count, descriptors, [9] * count)


def test_descriptors_that_come_and_go_are_no_growth_and_those_that_stay_are() -> None:
    steady, leaking = track([20, 23] * 30), track([20 + number // 10 for number in range(60)])
    assert steady.flat and not leaking.flat
    good = soak_section(Soaked([steady], 400, 20, 1800.0))
    assert good.sound and good.rows[0][-1] == "yes"
    bad = soak_section(Soaked([steady, leaking], 400, 20, 1800.0))
    assert not bad.sound and [row[-1] for row in bad.rows] == ["yes", "yes", "no", "no"]
    assert not soak_section(Soaked([], failure="no snapshot after 180 s")).sound


def test_results_of_several_calls_add_up_and_a_seed_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    records = Records(file)
    assert records.next_seed == 1
    right = Killed(1, 2, "gloo", [KILL], restarts=1, differences=[], seconds=9.0)
    wrong = Killed(2, 4, "gloo", [KILL], restarts=1, differences=["weights.0"], seconds=9.0)
    for result in (right, wrong, SaveKill(1, 0, "blocking", "between two renames", 0.1, 7, 6, None)):
        records.add(result)
    again = Records(file)
    assert again.killed == [right, wrong] and again.next_seed == 3 and len(again.saves) == 1
    again.add(Killed(2, 4, "gloo", [KILL], restarts=1, differences=[], seconds=9.0))
    section = kill_section([right], Records(file).killed)
    assert section.remarks[1].startswith("all recorded seeds: 2 of 2 runs (1 at np=2, 1 at np=4) end as")
    file.write_text(file.read_text() + '{"kind": "kill", "sead": 1}\n')
    result = CliRunner().invoke(bench, ["faults", "--add", str(file)])
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert "line 5 is no result of this test" in result.output


def test_every_fault_is_in_the_report_and_makes_it_unsound(tmp_path: Path) -> None:
    good = Killed(3, 2, "gloo", [KILL], restarts=1, differences=[], seconds=9.0)
    faulty = {
        "differences": (["weights.0"], "seed 3: differs: weights.0"),
        "unreadable": (["The snapshot 's' cannot be used."], "seed 3: The snapshot 's' cannot be used."),
        "lost": (1, "1 committed steps lost"),
        "left": (2, "2 processes left"),
    }
    report = Report("hvd-ckpt bench faults", {"machine": "m"})
    report.sections["kill"] = kill_section([good])
    report.sections["save"] = save_section(
        [SaveKill(3, 0, "background", "files being written", 0.1, 5, 4, None)]
    )
    assert report.sound
    assert "| 3 | 2 | gloo | rank 1 KILL 7* | 1 | 0 | 0 | 0 | yes | 9 |" in report.markdown()
    for name, (value, told) in faulty.items():
        report.sections["kill"] = kill_section([Killed(**{**asdict(good), name: value})])
        assert not report.sound and told in report.markdown()
    report.sections["kill"] = kill_section([Killed(3, 2, "gloo", failure="launch 1: no end after 9 s")])
    assert not report.sound and "| no end |" in report.markdown()
    report.sections["kill"] = kill_section([good])
    report.sections["save"] = save_section(
        [SaveKill(3, 4, "blocking", "files being written", 0.1, 5, 0, "it is gone")]
    )
    assert not report.sound and "kill 4 of seed 3, files being written: it is gone" in report.markdown()
    report.save(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["sound"] is False


def test_a_stall_that_is_longer_than_wanted_is_said_and_is_no_fault() -> None:
    rows = [
        StallRow("snapshot.write", 0.5, 1.0, 0.0, 150.0),
        StallRow("SnapshotWriter", 0.01, 0.02, 0.4, 150.0),
    ]
    met = stall_section(rows)
    assert met.rows[1] == ("SnapshotWriter", "150", "10.0", "0.020", "400")
    assert met.remarks == ["SnapshotWriter: 0.020 of a blocking save, wanted at most 0.05: met"]
    missed = stall_section([rows[0], StallRow("SnapshotWriter", 0.03, 0.06, 0.4, 150.0)])
    assert missed.remarks[0].endswith(": not met") and missed.sound


def written(run: Path, step: int, weight: float, loss: float = 1.0) -> Path:
    import torch

    common = {
        "optimizer": [torch.tensor(1.0)],
        "scaler": None,
        "progress": {"step": step},
        "plan": None,
        "samples": 9,
    }
    own = {"random": snapshot.random_state(), "buffers": {"mean": torch.tensor(-0.0)}, "logged": (0.0, 0.0)}
    (run / "log.jsonl").parent.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text(json.dumps({"step": step, "kind": "train", "loss": loss}) + "\n")
    weights = {"a": torch.tensor([1.0, weight])}
    return snapshot.write(run / "snapshots", step, weights=weights, common=common, own=own)


def test_runs_are_the_same_to_the_last_bit_or_what_differs_is_named(tmp_path: Path) -> None:
    ours, same, zero, other_loss = (tmp_path / name for name in ("ours", "same", "zero", "loss"))
    for run, weight, loss in ((ours, 0.0, 1.0), (same, 0.0, 1.0), (zero, -0.0, 1.0), (other_loss, 0.0, 2.0)):
        written(run, 3, weight, loss)
    assert differences(ours, same, 3, 1) == []
    assert differences(ours, zero, 3, 1) == ["weights.a"], "0 and -0 are equal and not the same"
    assert differences(ours, other_loss, 3, 1) == ["the loss of step 3 in the log"]
    newer = written(ours, 6, 0.0)
    assert newest_good(ours) == 6 and unreadable(ours, 1) == []
    (newer / "model.safetensors").write_bytes(bytes((newer / "model.safetensors").stat().st_size))
    assert newest_good(ours) == 3
    (fault,) = unreadable(ours, 1)
    assert "step-00000006' cannot be used: model.safetensors" in fault


def test_processes_are_found_by_their_mark_whoever_their_parent_is() -> None:
    token = f"test-{os.getpid()}"
    environment = {**os.environ, MARK: token, "HOROVOD_RANK": "3"}
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & exit 0"], env=environment)  # leaves an orphan
    parent.wait()
    deadline = time.monotonic() + 20
    while (found := [(one.rank, one.name) for one in marked(token)]) != [
        (3, "sleep")
    ] and time.monotonic() < deadline:
        time.sleep(0.01)  # the orphan is still called sh until it has become sleep
    assert found == [(3, "sleep")]
    end(token)
    assert marked(token) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "two"], "--np: 'two' is not a number of ranks"),
        (["--controller", "tcp"], "--controller: 'tcp' is none of auto, gloo, mpi"),
        (["--add", "/nowhere/results.jsonl"], "--add: the folder of '/nowhere/results.jsonl' does not exist"),
        (["--output", __file__], "--output: cannot write"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["faults", *arguments])
    assert result.exit_code == 2
    assert message in result.output and result.output.count("\n") == 1
