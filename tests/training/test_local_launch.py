"""``hvd-ckpt train --local`` in an elastic job, where a rank is killed within a period; resumed: test_local_training.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from controllers import HOROVODRUN, run_ranks
from same import assert_same
from snapshot_files import read_snapshot

pytestmark = pytest.mark.launch

PROGRAM = Path(sys.executable).parent / "hvd-ckpt"
STEPS = 14
MODULE = """
import os, signal
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional

steps = 0

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))

def samples():
    inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    return [(one, torch.tensor(number % 4)) for number, one in enumerate(inputs)]

def loss(output, targets):
    global steps
    steps += torch.is_grad_enabled()
    if steps == 9 and hvd.rank() == 1 and Path("kill").exists():
        Path("kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return functional.cross_entropy(output, targets)
"""
SETTINGS = ["--model=mine:make", "--data=mine:samples", "--loss=mine:loss", "--batch=4"]
SETTINGS += ["--local=5,outer_lr=0.7,outer_momentum=0.9,wire=int8", "--schedule=constant", f"--steps={STEPS}"]
SETTINGS += ["--blocking-snapshots", "--snapshot-every=5", "--keep-snapshots=9", "--log-every=5"]


def test_an_elastic_job_goes_on_from_the_last_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("mine.py").write_text(MODULE)
    Path("kill").touch()
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")  # two hosts to Horovod
    script.chmod(0o755)
    launcher = [*HOROVODRUN, "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    command = [*launcher, "--host-discovery-script", script, PROGRAM, "train", *SETTINGS, "--output=run"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Resumes after step 5 on 1 ranks, learning rate x 1." in job.stdout  # the rank was lost in step 9
    assert not Path("kill").exists()

    shutil.copytree("run/snapshots/step-00000005", "again/snapshots/step-00000005")
    shutil.copy("run/config.yaml", "again")
    status, output = run_ranks(1, PROGRAM, "train", "--resume=again")
    assert status == 0, output
    ends = [read_snapshot(Path(run, "snapshots", f"step-{STEPS:08d}"), 0) for run in ("run", "again")]
    for kind in {name.partition("/")[0] for name in ends[0].manifest.tensors}:
        assert_same(*(end.whole_tensors(kind) for end in ends), place=kind)
    assert ends[0].replicated["progress"]["position"] == 4 * (2 * 5 + STEPS - 5)
