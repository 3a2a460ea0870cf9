"""Each benchmark command in short, with its job in the ranks of this session instead of new ones: every rank calls the command."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import hvd_ckpt as hc
from benchmarks import engines, suites
from benchmarks.__main__ import benchmarks as bench
from hvd_ckpt.app.compare.runner.jobs import JobError, RankJob, load_json, reason, save_json
from hvd_ckpt.utils.named import import_named

pytestmark = [pytest.mark.ranks(gloo=(2,)), pytest.mark.usefixtures("quick_planner")]

PLANTED = Path(__file__).resolve().parents[1] / "helpers" / "scripts"
MIB = 1 << 20
Command = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a suite with arguments; returns its exit status, its output and ``results.json``."""

    def run_here(job: RankJob, result: Any, controller: str, timeout: float, **_: object) -> list[Any]:
        assert (job.size, controller) == (hc.size(), "gloo")
        job = dataclasses.replace(job, folder=folder / job.folder.name)
        if hc.rank() == 0:
            job.save()
        hc.barrier()
        error = None
        try:
            found = import_named("function", job.worker)(load_json(type(job), job.file))
            save_json(found, job.result_file(hc.rank()))
        except RuntimeError as raised:
            error = reason(raised)
        for told in hc.allgather_object(error):
            if told is not None:
                raise JobError(told)
        return [load_json(result, job.result_file(rank)) for rank in range(job.size)]

    monkeypatch.setattr("hvd_ckpt.app.compare.runner.jobs.run_job", run_here)
    monkeypatch.setattr("benchmarks.shard.command.run_job", run_here, raising=False)

    def run(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        output = folder / f"output{hc.rank()}"
        result = CliRunner().invoke(bench, [*arguments, "--output", str(output)])
        assert isinstance(result.exception, SystemExit | None), result.exception
        hc.barrier()
        assert (output / "report.md").stat().st_size > 100
        return result.exit_code, result.output, json.loads((output / "results.json").read_text())

    yield run
    gc.unfreeze()


def test_reduce_times_engines_and_names_one_that_fails(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(PLANTED)])
    status, output, report = command(
        *("reduce", "--np", "2", "--controller", "gloo", "--workloads", "densenet"),
        *("--rounds", "1", "--steps", "1", "--engines", "hvd_ckpt,horovod,planted_engines:Broken"),
    )
    assert status == 1
    assert "planted_engines:Broken, 2 ranks over gloo: RuntimeError: no network for you" in output
    ours, stock, broken = report["results"]
    assert ours["of_horovod"]["median"] == pytest.approx(ours["rounds"][0] / stock["rounds"][0])
    assert all(4 < one["beyond_bytes"] / MIB < 5 for one in (ours, stock)), "4.2 MiB of gradients, held once"
    assert broken["rounds"] == [] and "no network" in broken["failure"]


OWN_SUITE = """
from benchmarks.suite import Suite

mine = Suite(
    name="mine", title="Mine", help="Time mine.", engines=("hvd_ckpt",), workloads={"gpt": ""}, columns=("hash",),
    against={"of hvd_ckpt": "hvd_ckpt"}, np="2", rounds=1, steps=1, quick_sizes={"gpt": {"width": 16, "layers": 1}},
)
"""
OWN_ENGINE = """
from hvd_ckpt.app.compare.runner.engines import HvdCkpt

class Mine(HvdCkpt):
    suites = ("mine",)

ENGINES = {"mine": Mine}
"""


def test_a_suite_and_an_engine_are_one_file_each(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, text in ((suites, OWN_SUITE), (engines, OWN_ENGINE)):
        own = folder / package.__name__
        if hc.rank() == 0:
            own.mkdir()
            (own / "mine.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(own)])
    hc.barrier()
    engines.engines.cache_clear()
    try:
        status, output, report = command("mine", "--quick")
    finally:
        engines.engines.cache_clear()
    assert status == 0, output
    ours, mine = report["results"]
    assert (ours["engine"], mine["engine"]) == ("hvd_ckpt", "mine")
    assert mine["hash"] == ours["hash"] and mine["of_hvd_ckpt"]


@pytest.fixture
def text(folder: Path) -> str:
    if hc.rank() == 0:
        (folder / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    hc.barrier()
    return str(folder / "text")


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of PyTorch 2.6 does not run on CPUs"
)
def test_shard_measures_a_stage_beside_a_peer_that_trains_the_same(
    command: Command, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # torch.distributed's, which the job sets: taken back after the test
    try:
        status, output, report = command(
            *("shard", "--quick", "--np", "2", "--controller", "gloo", "--stages", "3", "--peers", "fsdp2"),
            *("--accumulate", "1", "--rounds", "1", "--text", text),
        )
    finally:
        torch.distributed.destroy_process_group()
    assert status == 0, output
    found = {line["configuration"]: line for line in report["results"]}
    assert set(found) == {
        *("hvd_ckpt-3", "hvd_ckpt-3-recompute", "hvd_ckpt-3-offload", "hvd_ckpt-3-offload-recompute"),
        *("fsdp2-3", "fsdp2-3-recompute"),
    }
    ranks = {name: line["ranks"][0] for name, line in found.items()}
    ours, offloaded = ranks["hvd_ckpt-3"], ranks["hvd_ckpt-3-offload"]
    assert ours["counted"] == ranks["hvd_ckpt-3-recompute"]["counted"] > 0, "recomputation sends nothing"
    assert all(line["loss_difference"] < 1e-4 for line in found.values())
    assert all(len(rank["seconds"]) == 1 and rank["peak"] > rank["parameters"] for rank in ranks.values())
    # Adam in float32 needs 16 bytes for each parameter, of which each of two ranks holds half.
    elements = int(report["model"].split()[0])
    assert 8 <= (ours["parameters"] + ours["gradients"] + ours["state"]) / elements < 1.05 * 8
    assert offloaded["state"] == 0 and offloaded["on_disk"] == ours["state"]


def test_shard_trains_in_every_wire_format(command: Command, text: str) -> None:
    options = ("--wire", "--quick", "--np", "2", "--controller", "gloo", "--accumulate", "1", "--steps", "2")
    status, output, report = command("shard", *options, "--text", text)
    assert status == 0, output
    assert [(run["stage"], run["format"]) for run in report["results"]] == [
        (stage, name) for stage in (2, 3) for name in ("fp32", "fp16", "bf16", "int8", "int4")
    ]
    assert all(
        run["sent"] > 0 and len(run["losses"]) == 2 and None not in run["losses"] for run in report["results"]
    )


def test_both_loops_of_train_do_the_same(command: Command, folder: Path) -> None:
    status, output, report = command(
        *("train", "--models", "gpt-tiny", "--accumulate", "2", "--batch", "2", "--controller", "gloo"),
        *("--ranks", "2", "--rounds", "3", "--steps", "1"),
    )
    assert status == 0, output
    (case,) = report["results"]
    assert case["passed"] and case["differences"] == []
    assert len(case["trainer"]) == len(case["by_hand"]) == 3
    log = (folder / "0-2" / "run" / "log.jsonl").read_text().splitlines()
    assert len(log) == 7, "3 steps of warm-up, 3 rounds of one step, one that ends the last round"
