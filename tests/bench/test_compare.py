"""Tests of the parts of a comparison in one process: batches, the reference, the verdicts, the report."""

from __future__ import annotations

import json
import re
from math import inf, nan

import pytest
import torch
from torch import nn

from hvd_ckpt.app.compare.cells import Cell, TrainingSettings
from hvd_ckpt.app.compare.recording import Recording, executed
from hvd_ckpt.app.compare.reference import largest_difference
from hvd_ckpt.app.compare.report import make_report
from hvd_ckpt.app.compare.runner.jobs import EventReader, JobError, RankJob
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.training import fingerprint
from hvd_ckpt.app.compare.verdict import Result, add_ratios, judge
from hvd_ckpt.app.compare.workloads import make_workload
from hvd_ckpt.data.objectives import IGNORED

CELL = Cell("densenet", "reentrant", 2)


def test_fingerprint_sees_a_single_bit_and_the_name():
    one = torch.zeros(3)
    other = torch.tensor([0.0, 0.0, -0.0])
    assert fingerprint([("w", one)]) == fingerprint([("w", one.clone())])
    assert fingerprint([("w", one)]) != fingerprint([("w", other)])
    assert fingerprint([("w", one)]) != fingerprint([("v", one)])
    assert fingerprint([("w", one)]) != fingerprint([("w", one.double())])


def test_events_are_read_once_whole_and_in_order_of_time(tmp_path, monkeypatch):
    reader, job = EventReader(tmp_path), RankJob(tmp_path, 2)
    assert reader.new() == []
    for rank, event in ((1, {"event": "step"}), (0, {"event": "result", "loss": inf, "far": [inf]})):
        monkeypatch.setenv("HOROVOD_RANK", str(rank))
        job.tell(**event)
    with (tmp_path / "rank0.jsonl").open("a") as stream:
        stream.write('{"event": "half", "ra')
    events = reader.new()
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    result, step = sorted(events, key=lambda event: event["event"])
    assert (step["event"], step["rank"]) == ("step", 1)
    assert (result["loss"], result["far"], result["rank"]) == (inf, [inf], 0)
    assert reader.new() == []
    with (tmp_path / "rank0.jsonl").open("a") as stream:
        stream.write('nk": 0, "time": 0}\n')
    assert [event["event"] for event in reader.new()] == ["half"]


def trained(rank, **changes):
    off = {"difference": 0.0, "relative": 0.0, "worst": ""}
    off |= {f"buffer_{name}": value for name, value in off.items()}
    return {"weights": "w", "buffers": f"b{rank}", "most": 1, "order": f"o{rank}", **off, **changes}


def measured(rank, **changes):
    values = {"weights": "w", "buffers": f"b{rank}", "peak_bytes": 100 + rank}
    return {**values, "most": 1, "order": f"o{rank}", **changes}


def timed(rank, seconds=(9.0, 9.0, 1.0, 3.0), **changes):
    return {"weights": "w", "buffers": f"b{rank}", "seconds": list(seconds), **changes}


def judged(*trainings, cell=CELL):
    return judge(cell, "engine", trainings)


RANKS = [trained(0), trained(1)]


def test_a_right_result_has_its_figures():
    result = judged(
        RANKS,
        [measured(0), measured(1)],
        [timed(0), timed(1, seconds=[9, 9, 2.0, 1.0])],
        [timed(0), timed(1)],
    )
    assert (result.status, result.reason, result.right) == ("right", "", True)
    assert (result.runs, result.peak_bytes, result.most, result.same_order) == (4, 101, 1, True)
    assert result.pass_seconds == (2.5, 2.0)  # of the slowest rank, warm-up left out
    assert result.step_seconds == 2.25


def test_ratio_is_to_stock_horovod_pass_by_pass():
    """To its time without recomputation where that was measured, else to its time in the same cell."""
    expected = {
        ("horovod", "densenet", "none", (2.0, 4.0)): 1.0,
        ("horovod", "densenet", "reentrant", (4.0, 4.0)): 1.5,
        ("engine", "densenet", "reentrant", (1.0, 4.0)): 0.75,
        ("horovod", "plain", "reentrant", (5.0,)): 1.0,
        ("engine", "plain", "reentrant", (4.0,)): 0.8,
        ("engine", "tied", "reentrant", (4.0,)): None,
    }
    results = [
        Result(engine, workload, variant, 0 if variant == "none" else 2, "right", pass_seconds=seconds)
        for engine, workload, variant, seconds in expected
    ]
    add_ratios(results)
    assert [found.ratio for found in results] == list(expected.values())


def test_timelines_tell_what_was_executed_in_order(tmp_path):
    def named(pid, name):
        return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}

    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1}},
        named(1, "allreduce.hvd_ckpt.7.0.bucket.0"),
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1},
        named(2, "allgather.sizes"),
        {"ph": "B", "name": "ALLGATHER", "ts": 2, "pid": 2},
        {"ph": "B", "name": "ALLREDUCE", "ts": 3, "pid": 1},
        {"ph": "E", "ts": 4, "pid": 1},
    ]
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    assert executed(tmp_path / "timeline.json") == ["allgather sizes", "allreduce bucket.0"]


def test_batches_follow_from_seed_rank_and_step_and_padding_is_not_predicted(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"z" * 5000)
    text = make_workload("bert", TrainingSettings(1, 3, "quick", str(file)))
    batch = text.batch(0, 2, 5)
    seen, predicted = batch.shared["attention_mask"].squeeze((1, 2)), batch.targets != IGNORED
    assert set(batch.inputs[0][seen & ~predicted].tolist()) == {ord("z")}
    assert set(batch.targets[predicted].tolist()) == {ord("z")}
    assert not (predicted & ~seen).any() and not seen.all()
    for workload in (text, make_workload("densenet", TrainingSettings(1, 3, "quick"))):
        batch, again = workload.batch(0, 2, 5), workload.batch(0, 2, 5)
        assert torch.equal(batch.inputs[0], again.inputs[0])
        for other in (workload.batch(1, 2, 5), workload.batch(0, 2, 6)):
            assert not torch.equal(batch.inputs[0], other.inputs[0])


@pytest.mark.parametrize("bad", [nan, inf])
def test_difference_is_absolute_and_relative_to_what_training_changed(bad):
    start = {"big": torch.zeros(2), "small": torch.zeros(2)}
    expected = {"big": torch.tensor([10.0, 0.0]), "small": torch.tensor([0.1, 0.0])}
    found = {"big": torch.tensor([10.5, 0.0]), "small": torch.tensor([0.0, 0.0])}
    lost = {**expected, "small": torch.tensor([0.0, bad])}
    relative = pytest.approx(0.1 / (0.1 + 0.01 * 10))
    assert largest_difference(expected, expected, start) == (0.0, 0.0, "")
    assert largest_difference(found, expected, start) == (0.5, relative, "small")
    assert largest_difference({**found, "small": lost["small"]}, expected, start)[0] == inf
    assert largest_difference({}, expected, start) == (inf, inf, "big")
    for other in (found, lost):
        assert largest_difference(other, lost, start) == (inf, inf, "small")


TWICE = [trained(rank, most=2) for rank in (0, 1)]
MAY_REDUCE_AGAIN = Cell("changing-graph", "reentrant", 2)  # a late gradient


@pytest.mark.parametrize(
    ("trainings", "cell", "reason", "status"),
    [
        ([[trained(0), trained(1, weights="v")]], CELL, "ranks differ", "wrong"),
        ([[trained(0), trained(1, relative=0.5, worst="stem")]], CELL, "weights off by 50 % .*stem", "wrong"),
        ([[trained(0), trained(1, relative=inf, difference=inf)]], CELL, "weights off by inf %", "wrong"),
        ([[trained(0, buffer_relative=1, buffer_worst="mean"), trained(1)]], CELL, "buffers off by 100 % .*mean", "wrong"),
        ([RANKS, [measured(0), measured(1, buffers="x")]], CELL, "runs differ", "wrong"),
        ([RANKS, [measured(0, weights="v"), measured(1, weights="v")]], CELL, "^runs differ$", "wrong"),
        ([RANKS, [timed(0, weights="v"), timed(1, weights="v")]], CELL, "^runs differ$", "wrong"),
        (JobError("why", "hang"), CELL, "^why$", "hang"),
        ([RANKS, [measured(0, order="x"), measured(1)]], CELL, "order of reductions differs", "loose"),
        ([TWICE], CELL, "a gradient is reduced 2 times in a step", "loose"),
        ([[trained(0, relative=1e-5, difference=1e-7), trained(1)]], CELL, "^$", "right"),  # rounding
        ([TWICE], MAY_REDUCE_AGAIN, "^$", "right"),
    ],
)  # fmt: skip
def test_wrong_results_name_their_difference(trainings, cell, reason, status):
    result = judge(cell, "engine", trainings)
    assert (result.status, result.right) == (status, status == "right")
    assert re.search(reason, result.reason), result.reason


def test_what_was_not_recorded_is_not_wrong():
    unknown = [
        {name: figure for name, figure in one.items() if name not in ("most", "order")} for one in RANKS
    ]
    result = judged(unknown)
    assert result.right and (result.most, result.same_order) == (None, None)


def test_a_comparison_succeeds_only_if_the_subject_is_right_everywhere(tmp_path):
    def report_of(*results, subject="engine", remarks=()):
        workloads = {"densenet": {"title": "T", "line": "L", "losses": [2.0, 1.0], "small": False}}
        run = BenchRun("compare", None)
        how = {"subject": subject, "title": "2 ranks", "facts": {"np": 2}, "remarks": remarks}
        return make_report(run, results, workloads, **how)

    right = judged(RANKS)
    wrong = judged([trained(0), trained(1, weights="v", difference=nan)])
    folded = judged([trained(rank, relative=1.0) for rank in (0, 1)], cell=Cell("densenet", "reentrant", 4))
    assert report_of(right).success
    assert not report_of(right, wrong).success
    assert not report_of(right, wrong, subject="other").success, "no result is no success"
    assert not report_of(judged([trained(0), trained(1, most=2)])).success, "loose is no success"
    assert "| densenet | reentrant | **wrong x4** |" in report_of(right, folded).markdown()

    wrong.engine = "other"
    report = report_of(right, wrong, remarks=["apex is absent: no GPU"])
    assert report.success
    report.save(tmp_path)
    values = json.loads((tmp_path / "results.json").read_text())
    assert values["right"] is True and values["remarks"] == ["apex is absent: no GPU"]
    assert [result["status"] for result in values["results"]] == ["right", "wrong"]
    page = (tmp_path / "report.md").read_text()
    assert "| densenet | reentrant | right | **wrong** |" in page and "apex is absent: no GPU" in page
    assert "other, densenet reentrant x2: wrong, ranks differ" in (tmp_path / "details.md").read_text()
    assert "(verdicts.png)" in page and (tmp_path / "verdicts.png").read_bytes().startswith(b"\x89PNG")


def test_a_gradient_is_reduced_with_the_memory_it_lies_in():
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in ("a", "b", "unused")}
    flat = torch.zeros(8)
    parameters["a"].grad, parameters["b"].grad = flat[:4], flat[4:]
    recording = Recording(parameters)
    recording.note_memory([flat], "bucket.0")
    recording.note_memory([torch.zeros(8)], "something else")
    recording.close_step()
    assert recording.order == ["a b"] and recording.most == 1
    recording.note_memory([flat[:4]], "a")
    recording.note_memory([torch.zeros(4)], "hvd_ckpt.3.0.single.0")
    recording.close_step()
    assert recording.order == ["a b", "a", "a"] and recording.most == 2
