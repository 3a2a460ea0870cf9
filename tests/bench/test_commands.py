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
from benchmarks.suites.shard import shard
from benchmarks.workloads import workload
from hvd_ckpt.app.compare.runner.jobs import EventReader, JobError, RankJob, reason, results_of_ranks
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
            job.tell("done", value=import_named("function", job.worker)(type(job).load(job.file)))
        except RuntimeError as raised:
            error = reason(raised)
        for told in hc.allgather_object(error):
            if told is not None:
                raise JobError(told)
        return results_of_ranks(EventReader(job.folder).new(), result)

    monkeypatch.setattr("hvd_ckpt.app.compare.runner.jobs.run_job", run_here)

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
        *("reduce", "--np", "2", "--controller", "gloo", "--workloads", "densenet-narrow"),
        *("--rounds", "1", "--steps", "1", "--engines", "hvd_ckpt,horovod,planted_engines:Broken"),
    )
    assert status == 1
    assert "planted_engines:Broken, 2 ranks over gloo: RuntimeError: no network for you" in output
    ours, stock, broken = report["results"]
    assert ours["of_horovod"]["median"] == pytest.approx(ours["rounds"][0] / stock["rounds"][0])
    assert all(4 < one["beyond_bytes"] / MIB < 5 for one in (ours, stock)), "4.2 MiB of gradients, held once"
    assert broken["rounds"] == [] and "no network" in broken["failure"]


OWN_SUITE = """'Time mine.'
from benchmarks.suite import Suite

mine = Suite(
    engines=("hvd_ckpt", "mine"), workloads=("gpt",), columns=("hash",),
    against={"of hvd_ckpt": "hvd_ckpt"}, np="2", rounds=1, steps=1, quick_sizes={"gpt": {"width": 16, "layers": 1}},
)
"""
OWN_ENGINE = """
from hvd_ckpt.app.compare.runner.engines import HvdCkpt

class Mine(HvdCkpt):
    pass

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


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of PyTorch 2.6 does not run on CPUs"
)
def test_shard_measures_a_stage_beside_a_peer_that_trains_the_same(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # torch.distributed's, which the job sets: taken back after the test
    try:
        status, output, report = command(
            *("shard", "--quick", "--np", "2", "--controller", "gloo", "--stage", "3", "--passes", "1"),
            *("--rounds", "1", "--engines", "stage-3,stage-3-offload,fsdp2-3"),
        )
    finally:
        torch.distributed.destroy_process_group()
    assert status == 0, output
    rows = {(row["engine"], row["recompute"]): row for row in report["results"]}
    assert len(rows) == 6
    ours, offloaded = rows["stage-3", "no"], rows["stage-3-offload", "no"]
    assert ours["sent"] == rows["stage-3", "yes"]["sent"] > 0, "recomputation sends nothing"
    assert max(row["loss"] for row in rows.values()) - min(row["loss"] for row in rows.values()) < 1e-4
    for row in rows.values():
        assert len(row["rounds"]) == 1 and row["peak_bytes"] > row["figures"]["parameter_bytes"][0]
    # Adam in float32 needs 16 bytes for each parameter, of which each of two ranks holds half.
    elements = sum(
        parameter.numel() for parameter in workload("gpt", shard.quick_sizes["gpt"]).model().parameters()
    )
    held = [ours["figures"][f"{kind}_bytes"][0] for kind in ("parameter", "gradient", "state")]
    assert 8 <= sum(held) / elements < 1.05 * 8
    assert offloaded["figures"]["state_bytes"][0] == 0


def test_shard_trains_in_wire_formats_that_send_less(command: Command) -> None:
    status, output, report = command(
        *("shard", "--quick", "--np", "2", "--controller", "gloo", "--passes", "1", "--rounds", "2"),
        *("--recompute", "no", "--wire", "fp32,bf16,int4", "--engines", "stage-3", "--stage", "3"),
    )
    assert status == 0, output
    assert [row["wire"] for row in report["results"]] == ["fp32", "bf16", "int4"]
    whole, half, least = (row["sent"] for row in report["results"])
    assert whole > half > least > 0


def test_both_loops_of_train_do_the_same(command: Command, folder: Path) -> None:
    status, output, report = command(
        "train", "--quick", "--np", "2", "--controller", "gloo", "--accumulate", "2", "--rounds", "1"
    )
    assert status == 0, output
    trainer, by_hand = report["results"]
    assert (trainer["engine"], by_hand["engine"]) == ("trainer", "by-hand")
    assert trainer["same_weights"] == "yes" and trainer["of_by-hand"]
    assert len(trainer["rounds"]) == len(by_hand["rounds"]) == 1
    log = next(folder.glob("trainer*/gpt-tiny-2/log.jsonl")).read_text().splitlines()
    assert len(log) == 2, "an entry of 10 steps would be the first; the last one ends the run"
