"""``hvd-ckpt compare`` on two ranks: exit status, report, engines that are wrong, hang or raise, mixed precision.

The commands run in this process, so that all of them share one fork server.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from hvd_ckpt.app.compare.command import compare

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--np", "2", "--quick", "--steps", "2", "--chunks", "2")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; returns its exit status, its output, and results by engine, workload and variant."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "helpers" / "scripts"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(**options):
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        output = tmp_path / "out"
        result = CliRunner().invoke(compare, [*SMALL, *arguments, "--output", str(output)])
        assert isinstance(result.exception, SystemExit | None), result.output
        assert (output / "results.json").exists(), result.output
        found = json.loads((output / "results.json").read_text())["results"]
        names = ("engine", "workload", "variant")
        results = {tuple(one[name].rpartition(":")[2] for name in names): one for one in found}
        return result.exit_code, result.output, results

    return run


def no_rank_is_left(output):
    files = output.glob("out/jobs/**/rank*.jsonl")
    started = [json.loads(file.read_text().splitlines()[0]) for file in files]
    return started and not any(psutil.pid_exists(event["pid"]) for event in started)


def test_exit_status_is_0_if_this_library_is_right_whatever_the_others_are(run, tmp_path):
    engines = ",".join(f"planted_engines:{name}" for name in ("Broken", "Absent", "Twice"))
    status, output, results = run(
        engines=f"hvd_ckpt,{engines}", workloads="bert", scenarios="plain", variants="none,reentrant"
    )  # fmt: skip
    assert status == 0, output
    assert "\x1b" not in output and "Traceback" not in output  # live lines are for terminals
    assert "hvd_ckpt is right in all 3 cells." in output
    mine = {key[1:]: one for key, one in results.items() if key[0] == "hvd_ckpt"}
    assert set(mine) == {("bert", "none"), ("bert", "reentrant"), ("plain", "reentrant")}
    for key, one in mine.items():
        timed = key[0] != "plain"  # a scenario is not
        assert one["right"] and one["ranks_equal"] and one["repeatable"] and one["difference"] < 1e-5
        assert (one["runs"], one["most"], one["same_order"]) == (2 + timed, 1, True)
        assert not timed or (one["peak_bytes"] > 10_000 and one["step_seconds"] > 0)
        twice = results[("Twice", *key)]
        assert twice["status"] == "loose"
        assert (twice["most"], twice["same_order"], twice["weights_right"]) == (2, False, True)
    broken = [one for key, one in results.items() if key[0] == "Broken"]
    assert {one["status"] for one in broken} == {"error"} and len(broken) == 3
    assert {one["reason"] for one in broken} == {"RuntimeError: no network for you"}
    assert mine["bert", "reentrant"]["difference"] == mine["bert", "none"]["difference"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| bert | reentrant | right |" in page
    assert "planted_engines:Absent is absent: it was planted so" in page
    details = (tmp_path / "out" / "details.md").read_text()
    assert "| bert | reentrant x2 | hvd_ckpt | right | equal |" in details
    assert "BERT learning masked words" in details


def test_exit_status_is_1_if_the_judged_engine_is_wrong_hangs_or_raises(run, tmp_path):
    faulty = "planted_engines:Faulty"
    status, output, results = run(
        engines=faulty, subject=faulty, workloads="densenet", scenarios="nothing", timeout="20"
    )
    assert status == 1, output
    assert "is not right in 3 of 3 cells: densenet none, densenet reentrant x2" in output
    alone, hang, error = (
        results["Faulty", "densenet", variant] for variant in ("none", "reentrant", "non-reentrant")
    )
    assert alone["status"] == "wrong" and "ranks differ; weights off" in alone["reason"]
    assert not alone["ranks_equal"] and not alone["weights_right"]
    assert alone["repeatable"] and alone["runs"] == 3
    assert hang["status"] == "hang" and "rank 1 after step 1" in hang["reason"]
    # A fresh job continued with the cell that was left.
    assert (error["status"], error["reason"]) == ("error", "ArithmeticError: planted on rank 1")
    assert no_rank_is_left(tmp_path)


def test_an_engine_that_joins_through_mpi_gets_processes_of_its_own(run, tmp_path):
    """MPI cannot be joined twice in a process, so a fork will not do."""
    status, output, results = run(
        controller="mpi", engines="horovod", subject="horovod", workloads="nothing", scenarios="tied",
        variants="reentrant", passes="0",
    )  # fmt: skip
    assert status == 1, output
    error = results["horovod", "tied", "reentrant"]
    assert error["status"] == "error" and "tied" not in error["reason"]
    assert no_rank_is_left(tmp_path)


def test_the_script_of_the_original_comparison_trains_in_mixed_precision(tmp_path, monkeypatch):
    """The gradients overflow on one rank, whose step all must skip."""

    def call(command):
        assert command[:2] == ["hvd-ckpt", "compare"]
        return CliRunner().invoke(compare, command[2:]).exit_code

    monkeypatch.setattr("subprocess.call", call)
    script = runpy.run_path(
        str(ROOT / "examples" / "test_memory_optimized_horovod_apex_comparison.py"), run_name="example"
    )
    options = ("--workloads", "nothing", "--scenarios", "overflow-on-one-rank", "--passes", "0")
    folder = ("--output", str(tmp_path / "report"))
    assert script["main"](["--use_amp", *SMALL, *options, "--engines", "hvd_ckpt,apex", *folder]) == 0
    report = json.loads((tmp_path / "report" / "results.json").read_text())
    ours = [one for one in report["results"] if one["engine"] == "hvd_ckpt"]
    assert [one["variant"] for one in ours if one["right"]] == ["reentrant", "non-reentrant"]
    assert report["precision"] in ("fp16", "apex-O1")


def test_more_segments_than_blocks_is_one_line_after_the_reference(tmp_path):
    options = "--quick --steps 1 --workloads densenet --scenarios nothing --variants reentrant --chunks 99"
    result = CliRunner().invoke(compare, [*options.split(), "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.output.startswith("Error: 99 chunks are too many for densenet: it has 13 blocks")
    assert result.output.count("\n") == 1
