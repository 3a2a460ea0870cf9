"""The harness of the benchmarks: jobs and their errors, statistics, reports, commands, their exit status and bad arguments."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from pydantic import Field

from benchmarks.__main__ import benchmarks
from benchmarks.quartiles import Quartiles, quartiles, quartiles_of_ratios
from benchmarks.suites.local import local
from benchmarks.suites.offload import offload
from benchmarks.suites.pipeline import pipeline
from benchmarks.suites.recompute import recompute
from benchmarks.suites.reduce import reduce
from benchmarks.suites.scale_on_hosts import scale_on_hosts
from benchmarks.workloads import WORKLOADS, workload
from hvd_ckpt.app.compare.command import compare
from hvd_ckpt.app.compare.runner.jobs import JobError, RankJob, run_job
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.report import Report, Table, machine_facts
from hvd_ckpt.app.compare.runner.settings import BenchSettings
from hvd_ckpt.app.compare.runner.stats import alternating, slowest
from hvd_ckpt.app.training.field_types import Count
from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.launchers import launched_rank


@dataclass(frozen=True)
class Job(RankJob):
    """Ranks that measure nothing; rank ``broken`` raises an error."""

    worker = f"{__name__}:measure"

    names: tuple[str, ...] = ()
    broken: int | None = None


@dataclass
class Inner:
    value: float


@dataclass
class Result:
    rank: int
    inner: dict[str, Inner]


def measure(job: Job) -> Result:
    rank = launched_rank()
    assert rank is not None
    if rank == job.broken:
        raise ArithmeticError(f"planted\non rank {rank}")
    return Result(rank, {name: Inner(math.inf) for name in job.names})


def test_a_job_gives_the_result_of_each_rank_in_order_or_the_error_of_one(tmp_path, monkeypatch) -> None:
    """Ranks run this file as the module ``test_harness``."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(Job, "worker", f"{Path(__file__).stem}:measure")
    ranks = run_job(Job(tmp_path / "job", 2, ("a", "b")), Result, "gloo", 60)
    assert ranks == [Result(rank, {"a": Inner(math.inf), "b": Inner(math.inf)}) for rank in (0, 1)]
    with pytest.raises(JobError, match="ArithmeticError: planted .*log.txt"):
        run_job(Job(tmp_path / "broken", 2, broken=1), Result, "gloo", 60)


def test_a_process_ends_with_everything_that_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"process = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "print(process.pid, flush=True)\ntime.sleep(600)"
    )
    log = tmp_path / "log.txt"
    with Process([sys.executable, "-c", parent], log) as process:
        while not log.read_text().strip():
            time.sleep(0.01)
        assert process.wait(0.01) is None
    pid = int(log.read_text())
    assert process.status is not None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_error_of_a_log_is_its_first_traceback_or_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("[0]<stderr>:Traceback\n[0]<stderr>:ValueError: first\n[1]<stderr>:OSError: second\nend\n")
    assert error_line(log) == "ValueError: first"
    log.write_text("one\ntwo\n\n")
    assert error_line(log) == "two"
    log.write_text("")
    assert error_line(log)


def test_statistics() -> None:
    assert quartiles([4.0]) == Quartiles(4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(3.0, 2.0, 4.0)
    assert f"{Quartiles(1.0, 0.5, 2.0):.2f}" == "1.00 [0.50, 2.00]"
    assert list(alternating("ABC", 2)) == [(0, "A"), (0, "B"), (0, "C"), (1, "C"), (1, "B"), (1, "A")]
    assert slowest([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]]) == [3.0, 2.0, 9.0]
    # The machine is ten times as slow in the second round; the third has no partner.
    assert quartiles_of_ratios([1.0, 10.0, 7.0], [2.0, 20.0]) == Quartiles(0.5, 0.5, 0.5)
    assert quartiles_of_ratios([], [1.0]) is None


def test_a_report_is_a_page_results_for_programs_and_pictures(tmp_path: Path) -> None:
    def draw(folder: Path) -> list[str]:
        (folder / "picture.png").touch()
        return ["picture.png"]

    table = Table(("engine", "ms"), [("ddp", "1.0"), ("ddp", "2.0")], folded=1)
    results = [{"ratio": quartiles([1.0]), "far": math.inf, "none": None}]
    report = Report("A title", {"machine": "m"}, [table], results, ["a remark"], ["a note"], draw=draw)
    report.save(tmp_path)
    page = (tmp_path / "report.md").read_text()
    told = ("# A title", "- machine: m", "![picture](picture.png)", "| ddp | 2.0 |", "- a remark", "- a note")
    assert [words for words in told if words not in page] == []
    saved = json.loads((tmp_path / "results.json").read_text())
    ratio = {"median": 1.0, "low": 1.0, "high": 1.0}
    assert saved["machine"] == "m"
    assert saved["results"] == [{"ratio": ratio, "far": "Infinity", "none": None}]


def test_a_report_names_the_settings_of_the_environment_but_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush")
    facts = machine_facts()
    assert "HOROVOD_CYCLE_TIME=2" in facts["environment"] and "hush" not in repr(facts)


@pytest.mark.parametrize("success", [True, False])
def test_a_command_writes_its_report_and_ends_with_its_status(tmp_path: Path, success: bool) -> None:
    class Settings(BenchSettings):
        steps: Count = Field(2, description="Of the thing.")

    def work(run: BenchRun, settings: Settings) -> None:
        with run.progress(1) as show:
            show("the only part", 1)
        run.finish(Report("Thing", {}, [Table(("steps",), [(str(settings.steps),)])], success=success))

    thing = bench_command("thing", "Do a thing.", Settings, work)
    folder = tmp_path / "out"
    result = CliRunner().invoke(thing, ["--steps", "7", "--output", str(folder)])
    assert result.exit_code == (0 if success else 1), result.output
    assert f"Report: {folder / 'report.md'}" in result.output
    assert "| 7 |" in (folder / "report.md").read_text()
    for arguments in (["--steps", "0"], ["--output", str(folder)]):
        result = CliRunner().invoke(thing, arguments)
        assert result.exit_code == 2
        assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_a_loss_that_depends_on_all_its_parameters(name: str) -> None:
    suites = (recompute, pipeline, reduce, local, offload, scale_on_hosts)
    sizes = ChainMap(*(dict(suite.quick_sizes or suite.sizes) for suite in suites))
    trained = workload(name, sizes[name])
    torch.manual_seed(0)
    model = trained.model()
    inputs, targets = trained.draw(0, 0)
    trained.loss(model(inputs), targets).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


COMPARE = [
    ("--np 0", "--np is 0"),
    ("--controller smoke", "'smoke'"),
    ("--engines nccl", "no engine 'nccl': choose among hvd_ckpt, horovod, horovod-groups, ddp"),
    ("--engines nowhere.at_all:Engine", "nowhere.at_all"),
    ("--engines json:Nothing", "json:Nothing"),
    ("--engines json:JSONDecoder", "json:JSONDecoder"),
    ("--engines ddp", "--subject hvd_ckpt"),
    ("--engines ,", "--engines"),
    ("--workloads gpt", "--workloads: 'gpt'"),
    ("--scenarios easy,plain", "--scenarios: 'easy'"),
    ("--workloads nothing --scenarios nothing", "nothing to compare"),
    ("--scenarios plain --workloads nothing --variants explicit", "nothing to compare"),
    ("--precision apex-O1", "--precision apex-O1: NVIDIA Apex"),
    ("--device cuda", "--device cuda"),
    ("--chunks 2,0", "--chunks: '0'"),
    ("--text no/such/file", "--text: cannot read the text 'no/such/file'"),
    ("--text empty", "'empty'"),
    ("--output full", "--output: the folder 'full'"),
    ("--output empty", "--output: cannot write to 'empty'"),
    ("surplus", "surplus"),
]
BENCH = [
    ("reduce --np two", "--np: 'two'"),
    ("reduce --controller nccl", "--controller: 'nccl'"),
    ("reduce --workloads resnet", "--workloads: 'resnet'"),
    ("reduce --engines ddp,ddp", "--engines: 'ddp'"),
    ("reduce --rounds 0", "--rounds is 0"),
    ("reduce --device cuda", "--device cuda"),
    ("shard --device cuda", "--device cuda"),
    ("recompute --device meta", "'meta'"),
    ("recompute --np 0", "--np: '0'"),
    ("recompute --engines half", "--engines: no engine 'half'"),
    ("layouts --np 3 --link 100", "--np 3: on hosts there are 1, 2, 4"),
    ("scale --np 12", "--np 12: give numbers up to local=8"),
    ("shard --stage 4", "--stage: '4'"),
    ("shard --stage 3 --engines ddp", "nothing to measure"),
    ("shard --wire fp8", "--wire: 'fp8'"),
    ("snapshots --output empty", "--output: "),
    ("replicas --engines pull", "--engines: no engine 'pull'"),
    ("replicas --np 2,3", "--np 3: give powers of two up to --replicas 4"),
    ("train --workloads gpt-huge", "--workloads: 'gpt-huge'"),
    ("train --accumulate 1,8", "--accumulate: '8'"),
    ("local --set batch", "--set: 'batch' has no value"),
    ("local --set batch=[", "--set: '[' is not a value"),
    ("local --set batch=*a", "--set: '*a' is not a value"),
    ("local --set heds=2", "--set heds: the sizes of text are "),
    ("scale --set links=100", "--set links: the sizes of gpt-1.3b are "),
    ("scale --set link=fast", "--set link=fast: give such as link=25.0"),
    ("scale --set link=.nan", "--set link=nan: give such as link=25.0"),
    ("scale --set stages=0", "--set stages=0: give such as stages=8"),
]


@pytest.mark.parametrize(
    ("group", "arguments", "message"),
    [*((compare, *one) for one in COMPARE), *((benchmarks, *one) for one in BENCH)],
    ids=[arguments for arguments, _ in (*COMPARE, *BENCH)],
)
def test_a_bad_argument_is_one_line(group, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("full").mkdir()
    Path("full/file").touch()
    result = CliRunner().invoke(group, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and message in result.output
    assert result.output.count("\n") == 1
    assert not Path("runs").exists()
