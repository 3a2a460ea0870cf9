"""Benchmark commands in short, as whole commands that start jobs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import engines, suites
from benchmarks.__main__ import benchmarks
from benchmarks.case import Found, MeasuredJob
from benchmarks.suites.shard import shard
from benchmarks.worker import measure
from benchmarks.workloads import workload

pytestmark = pytest.mark.launch
PLANTED = Path(__file__).resolve().parents[1] / "helpers" / "scripts"
MIB = 1 << 20
Run = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a suite; returns its output and its results. The report is in ``tmp_path / "report"``."""

    def run(*arguments: str, status: int = 0) -> tuple[str, list[dict[str, Any]]]:
        result = CliRunner().invoke(benchmarks, [*arguments, "--output", str(tmp_path / "report")])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == status, result.output
        return result.output, json.loads((tmp_path / "report" / "results.json").read_text())["results"]

    return run


OF_TWO = ("--quick", "--np", "2", "--controller", "gloo", "--rounds", "1")


def test_reduce_times_engines_and_names_one_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLANTED))
    options = ("--controller", "gloo", "--workloads", "densenet-narrow", "--rounds", "1", "--steps", "1")
    engines = ("--engines", "hvd_ckpt,horovod,planted_engines:Broken")
    output, (ours, stock, broken) = run("reduce", "--np", "2", *options, *engines, status=1)
    assert "planted_engines:Broken, 2 ranks over gloo: RuntimeError: no network for you" in output
    assert ours["of_horovod"]["median"] == pytest.approx(ours["rounds"][0] / stock["rounds"][0])
    assert all(4 < one["beyond_bytes"] / MIB < 5 for one in (ours, stock)), "4.2 MiB of gradients, held once"
    assert broken["rounds"] == [] and "no network" in broken["failure"]


OWN_SUITE = """'Time mine.'
from benchmarks.suite import Suite

mine = Suite(
    engines=("none", "mine"), workloads=("gpt",), columns=("hash",),
    against={"of none": "none"}, np="1", rounds=1, steps=1, quick_sizes={"gpt": {"width": 16, "layers": 1}},
)
"""
OWN_ENGINE = """
from benchmarks.engines.recompute import Recomputation

class Mine(Recomputation):
    pass

ENGINES = {"mine": Mine}
"""


def test_a_suite_and_an_engine_are_one_file_each(run, tmp_path, monkeypatch) -> None:
    """In this process, which alone knows their folders."""
    for package, text in ((suites, OWN_SUITE), (engines, OWN_ENGINE)):
        own = tmp_path / package.__name__
        own.mkdir()
        (own / "mine.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(own)])

    def run_here(job: MeasuredJob, *_: object, **more: object) -> list[list[Found]]:
        job.save()
        return [measure(job)]

    monkeypatch.setattr("hvd_ckpt.app.compare.runner.jobs.run_job", run_here)
    engines.engines.cache_clear()
    try:
        none, mine = run("mine", "--quick")[1]
    finally:
        engines.engines.cache_clear()
    assert (none["engine"], mine["engine"]) == ("none", "mine")
    assert mine["hash"] == none["hash"] and mine["of_none"]


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of PyTorch 2.6 does not run on CPUs"
)
def test_shard_measures_a_stage_beside_a_peer_that_trains_the_same(run: Run) -> None:
    engines = ("--engines", "stage-3,stage-3-offload,fsdp2-3")
    rows = run("shard", *OF_TWO, "--stage", "3", "--passes", "1", *engines)[1]
    assert len(rows) == 6 and all(len(row["rounds"]) == 1 for row in rows)
    found = {(row["engine"], row["recompute"]): row for row in rows}
    ours, offloaded = found["stage-3", "no"], found["stage-3-offload", "no"]
    assert ours["sent"] == found["stage-3", "yes"]["sent"] > 0, "recomputation sends nothing"
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 1e-4
    assert all(row["peak_bytes"] > row["figures"]["parameter_bytes"][0] for row in rows)
    # Adam in float32 needs 16 bytes for each parameter, of which each of two ranks holds half.
    model = workload("gpt", shard.quick_sizes["gpt"]).model()
    held = [ours["figures"][f"{kind}_bytes"][0] for kind in ("parameter", "gradient", "state")]
    assert 8 <= sum(held) / sum(parameter.numel() for parameter in model.parameters()) < 1.05 * 8
    assert offloaded["figures"]["state_bytes"][0] == 0


def test_shard_trains_in_wire_formats_that_send_less(run: Run) -> None:
    options = ("--recompute", "no", "--wire", "fp32,bf16,int4", "--engines", "stage-3", "--stage", "3")
    rows = run("shard", *OF_TWO, "--passes", "1", *options)[1]
    assert [row["wire"] for row in rows] == ["fp32", "bf16", "int4"]
    whole, half, least = (row["sent"] for row in rows)
    assert whole > half > least > 0


def test_what_is_in_files_is_not_in_memory(run: Run) -> None:
    none, optimizer, parameters = run("offload", "--quick", "--rounds", "1", "--set", "width=256")[1]
    assert none["of_none"] is None and optimizer["of_none"] and parameters["of_none"]
    assert none["held_bytes"] > optimizer["held_bytes"] > parameters["held_bytes"]
    assert none["peak_bytes"] > optimizer["peak_bytes"] > parameters["peak_bytes"]


def test_ways_to_recompute_are_compared_with_none(run: Run, tmp_path: Path) -> None:
    engines = ["none", "blocks", "matmuls-saved", "half-saved", "plan-blocks"]
    options = ("--workloads", "lstm", "--rounds", "2", "--engines", ",".join(engines))
    rows = run("recompute", "--quick", *options)[1]
    assert [row["engine"] for row in rows] == engines
    assert all((len(row["rounds"]), row["result"]) == (2, "bitwise") for row in rows)
    _, blocks, *_, plan = rows
    assert plan["of_the_way"] and blocks["of_the_way"] is None and blocks["peak_of_none"] < 1
    assert "| blocks |" in (tmp_path / "report" / "report.md").read_text()


def test_both_loops_of_train_do_the_same(run: Run, tmp_path: Path) -> None:
    trainer, by_hand = run("train", *OF_TWO, "--accumulate", "2")[1]
    assert (trainer["engine"], by_hand["engine"]) == ("trainer", "by-hand")
    assert trainer["same_weights"] == "yes" and trainer["of_by-hand"]
    assert len(trainer["rounds"]) == len(by_hand["rounds"]) == 1
    log = next(tmp_path.glob("report/jobs/trainer*/gpt-tiny-2/log.jsonl")).read_text().splitlines()
    assert len(log) == 2, "an entry of 10 steps would be the first; the last one ends the run"


def test_methods_of_local_sgd_send_what_they_say(run: Run, tmp_path: Path) -> None:
    """Over a slow network, where one can be made."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    throttled = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "tc")))
    options = ("--quick", "--engines", "hvd_ckpt,int8-50,averager", "--set", f"text={text}")
    rows = run("local", *options, "--link", "100" if throttled else "none")[1]
    assert all(len(row["rounds"]) == 1 and 0 < row["loss"] < 7 for row in rows)
    synchronous, ours, torch = (row["sent"] for row in rows)
    assert 3.6 < torch / ours < 4  # a byte for each value, and scales
    assert synchronous / torch == pytest.approx(50)


def test_the_chosen_layout_is_beside_all_others(run: Run) -> None:
    (row,) = run("layouts", "--quick")[1]
    figures = {name: values[0] for name, values in row["figures"].items()}
    assert figures["of_best"] >= 1 and 0 < figures["of_memory"] <= 1
    assert len(figures["rows"]) > figures["layouts"] > 0
    tried = [layout for layout, *_, trial in figures["rows"][: figures["layouts"]] if trial is not None]
    assert figures["chosen"] in tried


def test_layouts_of_clusters_are_predicted(run: Run) -> None:
    slow, fast = run("clusters", "--quick")[1]
    assert (slow["link"], fast["link"]) == ("25", "400")
    assert 0 < slow["efficiency"] <= fast["efficiency"] <= 1
    assert slow["alone_efficiency"] <= slow["efficiency"]


def test_replicas_have_the_same_losses_on_any_number_of_ranks(run: Run, tmp_path: Path) -> None:
    rows = run("replicas", "--quick", "--np", "2,1")[1]
    losses = {(row["engine"], row["np"]): row["figures"]["losses"][0] for row in rows}
    assert losses["replicas", 2] == losses["replicas", 1] and len(losses["horovod", 2]) == 4
    assert [row["same_losses"] for row in rows if row["engine"] == "replicas"] == ["yes", "yes"]
    assert (tmp_path / "report" / "picture.png").stat().st_size > 10_000


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="PyTorch 2.6's own 1F1B does not end over Gloo"
)
def test_engines_of_pipeline_take_the_same_steps(run: Run) -> None:
    options = ("--workloads", "gpt", "--schedule", "1f1b", "--recompute", "never,always")
    whole, *rows = run("pipeline", "--quick", *options)[1]
    engines = [("never", "stages"), ("never", "torch-stages"), ("always", "stages")]
    assert [(row["recompute"], row["engine"]) for row in rows] == engines
    for row in rows:
        assert row["rounds"] and row["of_ideal"] and 0 < row["peak_bytes"] < whole["peak_bytes"]
    ours, theirs, recomputed = rows
    # Lengths of headers, random states and the loss.
    assert 0 < theirs["sent"] <= ours["sent"] < 2 * theirs["sent"]
    assert recomputed["peak_bytes"] < ours["peak_bytes"]


def test_steps_in_parts_are_timed_beside_pytorch(run: Run) -> None:
    ours, theirs = run("tensor", "--quick", "--rounds", "2")[1]
    assert (ours["engine"], theirs["engine"]) == ("parts", "torch-parts")
    assert len(ours["rounds"]) == 2 and ours["of_torch-parts"] and ours["peak_bytes"]
