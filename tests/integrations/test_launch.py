"""Errors of one rank under Lightning end all ranks, and are shown; the Trainer of transformers in jobs of torchrun, whose variables
Accelerate reads, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from controllers import run_ranks
from torch.distributed.elastic.utils.distributed import get_free_port

for package in ("lightning", "accelerate"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install -r install/requirements-tests.txt"
    )
pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "lightning_errors.py"


SAYS = dict.fromkeys(("step", "validation", "callback", "saving", "worker"), "ValueError: a bad sample")
SAYS |= {"interrupt": "ended by KeyboardInterrupt", "signal": "ended by SIGTERMException"}
SAYS |= {"exit": "ended by SystemExit"}


@pytest.mark.parametrize("where", SAYS)
def test_an_error_of_one_rank_ends_all(tmp_path: Path, where: str) -> None:
    status, output = run_ranks(2, SCRIPT, where, str(tmp_path), controller="gloo")
    assert status != 0
    assert SAYS[where] in output, output
    assert "rank 0 on host" in output  # which says why it ends
    assert "A checkpoint needs all ranks" in output
    assert not (tmp_path / "on_exception.ckpt").exists() and not (tmp_path / "own.ckpt").exists()


SPLIT = """
import sys, torch, transformers, hvd_ckpt as hc
from hvd_ckpt.app.integrations.transformers import Trainer

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        seen.extend(x[:, 0].int().tolist())
        return {"loss": self.layer(x).mean()}

seen = []
quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
# Accelerate connects the ranks here, before the Trainer is there.
arguments = transformers.TrainingArguments(sys.argv[1], per_device_train_batch_size=2, num_train_epochs=1, **quiet)
rows = [{"x": torch.tensor([float(number)]), "labels": torch.zeros(1)} for number in range(16)]
trainer = Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
everyone = sorted(number for part in hc.allgather_object(seen) for number in part)
assert everyone == list(range(16)), everyone
seen.clear()
trainer.evaluate()
assert seen == list(range(16)), seen
"""


def test_torchrun_splits_the_samples_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPLIT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    command = [*torchrun, "--master-port", str(get_free_port()), "train.py", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr[-3000:]
