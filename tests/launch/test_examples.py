"""Example scripts as commands: launched on two ranks, in a job of Slurm, with a bad flag. What each does: tests/parallel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ckpt.probe import find_launcher, launcher_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, *arguments, ranks=1, folder=None):
    """Exit status and output; what another rank than 0 printed is marked ``[1]<stdout>``."""
    launcher = [*find_launcher(), "-np", str(ranks), "--gloo"] if ranks > 1 else []
    environment = {**launcher_environment(), "OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment["XDG_CACHE_HOME"] = str(folder / "cache")
    result = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
        cwd=folder,
        env=environment,
    )
    return result.returncode, re.sub(
        r"^\[0\]<std(?:out|err)>:", "", result.stdout + result.stderr, flags=re.M
    )


def test_a_script_is_launched_on_two_ranks_and_rank_0_alone_tells_of_it(tmp_path):
    sizes = "--length 16 --batch 2 --width 16 --heads 2 --layers 2 --interval 1 --steps 2"
    status, output = run_example("gpt_lite.py", *sizes.split(), ranks=2, folder=tmp_path)
    assert status == 0, output
    assert len(re.findall(r"held-out loss [\d.]+", output)) == 1 and "[1]<stdout>" not in output


def test_the_script_before_and_after_migration_prints_the_same_losses(tmp_path):
    printed = []
    for version in ("before", "after"):
        status, output = run_example(
            "migrate_from_horovod.py", "--version", version, "--steps", "20", ranks=2, folder=tmp_path
        )
        assert status == 0, output
        printed.append(re.findall(r"^step \d+: loss [\d.]+", output, re.MULTILINE))
    assert len(printed[0]) == 2 and printed[0] == printed[1]


def test_a_bad_flag_is_one_line(tmp_path):
    status, output = run_example("gpt_lite.py", "--steps", "0", folder=tmp_path)
    assert status == 2 and "steps 0: give a whole number from 1" in output and output.count("\n") == 1


@pytest.mark.parametrize(
    "launcher, command",
    [
        ("horovodrun", "horovodrun -np 8 -H node1:4,node2:4 python train.py --text 'two words'"),
        ("srun", "srun --mpi=pmix --cpus-per-task=8 python train.py --text 'two words'"),
    ],
)
def test_the_job_of_slurm_starts_all_ranks_on_its_nodes(launcher, command, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in {
        "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"',
        "horovodrun": 'printf "%s " horovodrun "${@@Q}"; echo "threads $OMP_NUM_THREADS"',
        "srun": 'printf "%s " srun "${@@Q}"; echo "threads $OMP_NUM_THREADS"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
        "LAUNCHER": launcher,
        "PATH": os.environ["PATH"],
    }
    result = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "train.py", "--text", "two words"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env=job,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.replace("'", "").split() == [*command.replace("'", "").split(), "threads", "8"]


def test_the_original_comparison_with_mixed_precision(tmp_path):
    status, output = run_example(
        "test_memory_optimized_horovod_apex_comparison.py",
        *("--quick", "--use_amp", "--chunks", "2", "--workloads", "bert", "--passes", "0"),
        *("--output", str(tmp_path / "report")),
    )
    assert status == 0, output
    assert "hvd_ckpt is right in all 3 cells." in output
    page = (tmp_path / "report" / "report.md").read_text()
    assert "- precision: fp16" in page or "- precision: apex-O1" in page
    assert "apex is absent" in page or "| apex |" in page
