"""``hvd-ckpt compare`` as its user runs it: exit status, report, wrong engines, hangs, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.compare.command import compare
from hvd_ckpt.bench.compare.launch import Launcher, Outcome

pytestmark = pytest.mark.launch

SCRIPTS = Path(__file__).resolve().parents[1] / "helpers" / "scripts"
SMALL = ("--quick", "--steps", "2", "--workloads", "densenet", "--scenarios", "nothing", "--chunks", "2")


def run_compare(output, *arguments):
    """Run the command; returns its exit status, output and results by engine and cell."""
    paths = [str(SCRIPTS), str(SCRIPTS.parents[2]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-m", "hvd_ckpt.cli.main", "compare", *SMALL, *arguments, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "NP": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    file = Path(output) / "results.json"
    results = {}
    if file.exists():
        for result in json.loads(file.read_text())["results"]:
            results[result["engine"].removeprefix("planted_engines:"), result["variant"]] = result
    return process, results


def ranks_alive(output):
    """Ranks of a comparison that still run."""
    written = [
        json.loads(file.read_text().splitlines()[0]) for file in Path(output).glob("jobs/**/rank*.jsonl")
    ]
    return [event["pid"] for event in written if psutil.pid_exists(event["pid"])]


def test_exit_status_is_0_if_this_library_is_right_whatever_the_others_are(tmp_path):
    process, results = run_compare(
        tmp_path / "out",
        "--engines",
        "hvd_ckpt,planted_engines:Broken,planted_engines:Absent,planted_engines:Twice",
        "--variants",
        "reentrant,none",
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "\x1b" not in process.stderr and "Traceback" not in process.stderr  # live lines are for terminals
    assert "hvd_ckpt is right in all 2 cells." in process.stdout
    for variant in ("none", "reentrant"):
        mine = results["hvd_ckpt", variant]
        assert mine["right"]
        assert mine["ranks_equal"]
        assert mine["repeatable"]
        assert mine["runs"] == 3
        assert mine["difference"] < 1e-5
        assert (mine["least"], mine["most"], mine["same_order"]) == (1, 1, True)
        assert mine["peak_bytes"] > 100_000
        assert mine["step_seconds"] > 0
        twice = results["Twice", variant]
        assert twice["status"] == "loose"
        assert (twice["most"], twice["same_order"], twice["weights_right"]) == (2, False, True)
        assert results["Broken", variant]["status"] == "error"
        assert results["Broken", variant]["reason"] == "RuntimeError: no network for you"
    page = (tmp_path / "out" / "report.md").read_text()
    assert "DenseNet on handwritten digits" in page
    assert "planted_engines:Absent is absent: it was planted so" in page
    details = (tmp_path / "out" / "details.md").read_text()
    assert "| densenet | reentrant x2 | hvd_ckpt | right | equal |" in details


def test_exit_status_is_1_if_the_judged_engine_is_wrong_hangs_or_raises(tmp_path):
    faulty = "planted_engines:Faulty"
    process, results = run_compare(
        tmp_path / "out", "--engines", faulty, "--subject", faulty, "--timeout", "10"
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "is not right in 3 of 3 cells: densenet none, densenet reentrant x2" in process.stdout

    alone = results["Faulty", "none"]
    assert alone["status"] == "wrong"
    assert not alone["ranks_equal"]
    assert not alone["weights_right"]
    assert "ranks differ; weights off" in alone["reason"]
    assert alone["repeatable"]
    assert alone["runs"] == 3
    hang = results["Faulty", "reentrant"]
    assert hang["status"] == "hang"
    assert "no rank did a step for 10 s" in hang["reason"]
    assert "rank 1 after step 1" in hang["reason"]
    error = results["Faulty", "non-reentrant"]  # a fresh job went on with the cell that was left
    assert error["status"] == "error"
    assert error["reason"] == "ArithmeticError: planted on rank 1"
    assert ranks_alive(tmp_path / "out") == []


def test_an_engine_that_joins_through_mpi_gets_fresh_processes_after_an_error(tmp_path):
    """MPI cannot be joined twice in a process, so a fork will not do."""
    process, results = run_compare(
        tmp_path / "out",
        *("--controller", "mpi", "--engines", "horovod", "--subject", "horovod", "--workloads", "nothing"),
        *("--scenarios", "tied", "--passes", "0"),
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert results["horovod", "reentrant"]["status"] == "error"
    assert results["horovod", "non-reentrant"]["status"] in ("right", "loose")
    assert ranks_alive(tmp_path / "out") == []


def test_a_plan_is_compared_like_any_other_way_to_recompute(tmp_path):
    process, results = run_compare(
        tmp_path / "out",
        *("--budget", "0.5x", "--engines", "hvd_ckpt", "--variants", "none"),
        *("--workloads", "bert", "--scenarios", "plain"),
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert set(results) == {("hvd_ckpt", "none"), ("hvd_ckpt", "plan 0.5x")}
    kept, plan = results["hvd_ckpt", "none"], results["hvd_ckpt", "plan 0.5x"]
    assert (plan["workload"], plan["status"], plan["difference"]) == ("bert", "right", kept["difference"])
    assert (plan["runs"], plan["least"], plan["most"], plan["same_order"]) == (3, 1, 1, True)
    assert plan["peak_bytes"] < 0.8 * kept["peak_bytes"]
    assert plan["step_seconds"] > 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| bert | plan 0.5x | right |" in page
    assert "hvd_ckpt, plain plan 0.5x is left out: No plan stays within a budget of" in page


def test_more_segments_than_blocks_is_one_line_after_the_reference(tmp_path, monkeypatch):
    told = Outcome([{"event": "reference", "workload": "densenet", "layers": 13}])
    monkeypatch.setattr(Launcher, "reference", lambda self, job, listener: told)
    monkeypatch.setattr(Launcher, "__enter__", lambda self: self)  # nothing is started
    monkeypatch.setattr(Launcher, "__exit__", lambda self, *_: None)
    arguments = [*SMALL, "--chunks", "99", "--variants", "reentrant", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(compare, arguments)
    assert result.exit_code == 2
    assert result.output == "Error: 99 chunks are too many for densenet: it has 13 blocks\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "0"], "'--np': 0 is not in the range"),
        (["--np", "two"], "'two' is not a valid integer"),
        (["--controller", "smoke"], "'smoke' is not one of 'auto', 'gloo', 'mpi'"),
        (["--engines", "nccl"], "no engine 'nccl': choose among hvd_ckpt, horovod, horovod-groups, ddp"),
        (["--engines", "ddp"], "--subject hvd_ckpt is not among the engines ddp"),
        (["--engines", "hvd_ckpt,hvd_ckpt"], "'hvd_ckpt' is given twice"),
        (["--engines", ","], "--engines: give at least one"),
        (["--workloads", "gpt"], "--workloads: 'gpt' is none of densenet, bert, nothing"),
        (["--scenarios", "easy"], "--scenarios: 'easy' is none of plain, tied, nested"),
        (["--workloads", "nothing", "--scenarios", "nothing"], "there is nothing to compare"),
        (["--scenarios", "plain", "--workloads", "nothing", "--variants", "explicit"], "nothing to compare"),
        (["--precision", "fp8"], "'fp8' is not one of 'fp32', 'fp16', 'bf16', 'apex-O1'"),
        (["--precision", "apex-O1"], "--precision apex-O1: NVIDIA Apex"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no CUDA GPU"),
        (["--variants", "both"], "--variants: 'both' is none of none, reentrant, non-reentrant"),
        (["--chunks", "2,0"], "--chunks: '0' is not a number of segments"),
        (["--chunks", "-1"], "--chunks: '-1' is not a number of segments"),
        (["--budget", "half"], "--budget: budget must be bytes, or text like '6GiB'"),
        (["--budget", "0x"], "--budget: budget must be bytes, or text like '6GiB'"),
        (["--budget", "min", "--engines", "ddp", "--subject", "ddp"], "none of the engines ddp has plans"),
        (["--steps", "0"], "'--steps': 0 is not in the range"),
        (["--quick", "--full"], "--quick and --full exclude each other"),
        (["--text", "no/such/file"], "--text: cannot read the text 'no/such/file'"),
        (["--text", "empty"], "'empty' is empty"),
        (["--output", "full"], "--output: the folder 'full' is not empty"),
        (["--output", "empty"], "--output: cannot write to 'empty': File exists"),
        (["--colour"], "No such option"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("full").mkdir()
    Path("full/file").touch()
    result = CliRunner().invoke(compare, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1
    assert not Path("runs").exists()
