"""One job that runs ``hvd-ckpt train`` several times, one run after the other, since a job takes seconds to start.

Arguments: the number of pipeline stages, and a JSON file with a list of runs. Each has ``arguments`` of the command, and may have

- ``copy``: the folders of a run of another job and of a copy of it, which is made when that run has a snapshot of step ``steps``,
  with the snapshot of ``step`` alone;
- ``refused``: what the one line says with which the command ends before it trains.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import hvd_ckpt as hc
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.cli.main import main
from hvd_ckpt.processes.grid import current

SECONDS = 300


def wait_for(path: Path) -> None:
    limit = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"{path} does not come"
        time.sleep(0.02)


def copy(run: Path, to: Path, step: int, steps: int) -> None:
    """Another job's run, without its snapshots after ``step``."""
    wait_for(run / "snapshots" / f"step-{steps:08d}" / "manifest.json")
    if current().number == 0:
        unfinished = to.with_suffix(".unfinished")
        shutil.copytree(run / "snapshots" / f"step-{step:08d}", unfinished / "snapshots" / f"step-{step:08d}")
        shutil.copy(run / "config.yaml", unfinished)
        unfinished.rename(to)
    wait_for(to)


def train_all() -> None:
    stages, file = int(sys.argv[1]), Path(sys.argv[2])
    hc.init(stages=stages, stall_timeout=60)
    for one in json.loads(file.read_text("utf-8")):
        if "copy" in one:
            run, to = map(Path, one["copy"])
            copy(run, to, one["step"], one["steps"])
        expected = pytest.raises(BadArgument, match=one["refused"]) if "refused" in one else nullcontext()
        with expected:
            main(["train", *one["arguments"]], standalone_mode=False)


if __name__ == "__main__":
    train_all()
