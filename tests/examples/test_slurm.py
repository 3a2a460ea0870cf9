"""The batch script of Slurm starts all ranks of its job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "launcher, command",
    [
        ("horovodrun", "horovodrun -np 8 -H node1:4,node2:4 python train.py --text 'two words'"),
        ("srun", "srun --mpi=pmix --cpus-per-task=8 python train.py --text 'two words'"),
    ],
)
def test_the_job_of_slurm_starts_all_ranks_on_its_nodes(launcher, command, tmp_path):
    programs, activate = tmp_path / "programs", tmp_path / ".venv" / "bin" / "activate"
    programs.mkdir()
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{programs}:$PATH"\n')
    shows = '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"'
    says = 'printf "%s " {} "${{@@Q}}"; echo "threads $OMP_NUM_THREADS"'
    for name, body in {
        "scontrol": shows,
        **{one: says.format(one) for one in ("horovodrun", "srun")},
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "8"}
    job |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "8"}
    job |= {"LAUNCHER": launcher, "PATH": os.environ["PATH"]}
    words = ["bash", str(EXAMPLES / "slurm.sbatch"), "train.py", "--text", "two words"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd="/", env=job)
    assert result.returncode == 0, result.stderr
    assert result.stdout.replace("'", "").split() == [*command.replace("'", "").split(), "threads", "8"]
