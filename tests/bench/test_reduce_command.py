"""``hvd-ckpt bench reduce`` as its user runs it: exit status, report, an engine that fails, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench

pytestmark = pytest.mark.launch

SCRIPTS = Path(__file__).resolve().parents[1] / "helpers" / "scripts"
SMALL = ("--controller", "gloo", "--workloads", "densenet", "--pairs", "1")
MIB = 1 << 20


def run_bench(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SCRIPTS), str(SCRIPTS.parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "hvd_ckpt.cli.main", "bench", "reduce", *arguments, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_every_engine_is_timed_and_reported(tmp_path):
    output = tmp_path / "out"
    process = run_bench(output, "--np", "2", *SMALL, "--steps", "2")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "\x1b" not in process.stderr and "Traceback" not in process.stderr  # live lines are for terminals
    report = json.loads((output / "results.json").read_text())
    results = {result["engine"]: result for result in report["results"]}
    assert list(results) == ["hvd_ckpt", "horovod", "ddp"]
    ours, stock = results["hvd_ckpt"], results["horovod"]
    assert ours["of_horovod"]["median"] == pytest.approx(ours["jobs"][0] / stock["jobs"][0])
    assert stock["of_horovod"]["median"] == 1
    # Gradients of 4.24 MiB: held once here and in stock Horovod, twice by DDP.
    assert 4 < ours["gradient_bytes"] / MIB < 5
    assert 4 < stock["gradient_bytes"] / MIB < 5
    assert 8 < results["ddp"]["gradient_bytes"] / MIB < 10
    assert "--pairs 1 --steps 2" in report["command"]
    for text in (process.stdout, (output / "report.md").read_text()):
        for word in ("of horovod", "of ddp", "hvd_ckpt", "machine: ", "command: hvd-ckpt bench reduce"):
            assert word in text


def test_an_engine_that_fails_is_named(tmp_path):
    output = tmp_path / "out"
    process = run_bench(output, "--np", "1", *SMALL, "--steps", "1", "--engines", "planted_engines:Broken")
    assert process.returncode == 1, process.stdout + process.stderr
    assert "planted_engines:Broken, 1 ranks over gloo: RuntimeError: no network for you" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "two"], "--np: 'two' is not a number of ranks"),
        (["--controller", "nccl"], "--controller: 'nccl' is none of gloo, mpi"),
        (["--workloads", "resnet"], "--workloads: 'resnet' is none of densenet, transformer"),
        (["--engines", "apx"], "--engines: no engine 'apx'"),
        (["--engines", "ddp,ddp"], "--engines: 'ddp' is given twice"),
        (["--pairs", "0"], "'--pairs'"),
        (["--output", __file__], "--output: cannot write"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_status_2(arguments, message):
    result = CliRunner().invoke(bench, ["reduce", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
