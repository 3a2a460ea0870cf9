"""Logical replicas in an elastic job that loses a rank, which then comes back: it ends as one rank does that nothing disturbs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ckpt.app.training import logs
from hvd_ckpt.snapshots.reader import read

pytestmark = pytest.mark.launch

PROGRAM = str(Path(sys.executable).parent / "hvd-ckpt")
SECONDS = 240.0
MODEL = ["width=32", "layers=2", "heads=2", "dropout=0.1"]
SETTINGS = ["--model=gpt-tiny", *(f"--model-option={option}" for option in MODEL)]
SETTINGS += ["--sequence-length=16", "--batch=2", "--replicas=4", "--schedule=constant", "--seed=5"]
SETTINGS += ["--snapshot-every=20", "--commit-every=5", "--log-every=5", "--eval-batches=1"]


def is_second_rank(process: psutil.Process) -> bool:
    try:
        words, variables = process.cmdline(), process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # the script that lists hosts comes and goes
        return False
    return words[1:3] == [PROGRAM, "train"] and variables["HOROVOD_HOSTNAME"] == "127.0.0.1"


def test_a_rank_that_is_lost_and_comes_back_changes_nothing(tmp_path: Path) -> None:
    text, script, whole, run = (tmp_path / name for name in ("text.txt", "discover.sh", "whole", "run"))
    text.write_bytes(bytes(range(32, 127)) * 40)
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")  # two hosts to Horovod
    script.chmod(0o755)
    path = f"{Path(PROGRAM).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [PROGRAM, "train", *SETTINGS, f"--data=text:{text}"]
    launcher = ["horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    launcher += ["--gloo-timeout-seconds", "120"]  # in which a new rank must start on a busy machine
    launcher += ["--host-discovery-script", str(script), "--blacklist-cooldown-range", "10", "15"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [*launcher, *command, "--steps=100000", f"--output={run}"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def told() -> str:
        return (tmp_path / "log").read_text()

    def wait_for(condition: Callable[[], Any]) -> None:
        limit = time.monotonic() + SECONDS
        while not condition():
            assert job.poll() is None and time.monotonic() < limit, told()
            time.sleep(0.05)

    try:
        wait_for(lambda: list((run / "snapshots").glob("step-*")))
        (other,) = [one for one in psutil.Process(job.pid).children(recursive=True) if is_second_rank(one)]
        other.send_signal(signal.SIGKILL)
        wait_for(lambda: "on 1 ranks" in told())
        wait_for(lambda: "on 2 ranks" in told())
        (run / "stop").touch()
        assert job.wait(SECONDS) == 0, told()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
    last = max((run / "snapshots").glob("step-*"))
    steps = int(last.name.removeprefix("step-"))
    alone = [*command, f"--steps={steps}", f"--output={whole}"]
    subprocess.run(alone, env=environment, check=True, timeout=SECONDS)
    weights, expected = read(last, 0).weights, read(whole / "snapshots" / last.name, 0).weights
    assert all((weights[name] == expected[name]).all() for name in expected)
    losses, wanted = (
        [(one["step"], one["loss"]) for one in logs.read(folder / "log.jsonl") if one["step"] < steps]
        for folder in (run, whole)
    )
    assert losses == wanted and losses
