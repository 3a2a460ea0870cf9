"""Example scripts as commands: launched on two ranks, in a job of Slurm. What each does: tests/parallel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from controllers import HOROVODRUN

from hvd_ckpt.probe import launcher_environment

pytestmark = pytest.mark.launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, *arguments, ranks=1, folder=None):
    """Exit status and output; what another rank than 0 printed is marked ``[1]<stdout>``."""
    launcher = [*HOROVODRUN, "-np", str(ranks), "--gloo"] if ranks > 1 else []
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
    """A model, and small ones whose gradients overflow on one rank and whose layers are used several times."""
    report = tmp_path / "report"
    status, output = run_example(
        "test_memory_optimized_horovod_apex_comparison.py",
        *("--quick", "--use_amp", "--chunks", "2", "--workloads", "bert", "--passes", "0"),
        *("--scenarios", "overflow-on-one-rank,tied", "--variants", "non-reentrant,reentrant"),
        *("--engines", "hvd_ckpt,apex", "--output", str(report)),
    )
    assert status == 0, output
    found = json.loads((report / "results.json").read_text())["results"]
    ours = [one for one in found if one["engine"] == "hvd_ckpt"]
    assert {one["workload"] for one in ours} == {"bert", "overflow-on-one-rank", "tied"}
    assert all(one["right"] for one in ours)
    assert f"hvd_ckpt is right in all {len(ours)} cells." in output
    page = (report / "report.md").read_text()
    assert "- precision: fp16" in page or "- precision: apex-O1" in page
    assert "apex is absent" in page or "| apex |" in page
