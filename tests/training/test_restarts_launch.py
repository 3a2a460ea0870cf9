"""``hvd-ckpt train --max-restarts``: a job one of whose ranks is killed ends with the weights of one that was not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from controllers import HOROVODRUN
from hosts import Hosts, unavailable

from hvd_ckpt.snapshots.reader import read

pytestmark = [pytest.mark.launch, pytest.mark.hosts]

PROGRAM = str(Path(sys.executable).parent / "hvd-ckpt")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # else a host of one rank computes with more threads than one of two
STEPS, EVERY = 120, 20
SECONDS = 400.0
MODEL = ["width=32", "layers=2", "heads=2", "dropout=0.1", "tied=false"]
SETTINGS = ["--model=gpt-tiny", *(f"--model-option={option}" for option in MODEL), "--log-every=1000"]
SETTINGS += ["--sequence-length=16", "--batch=4", f"--steps={STEPS}", f"--snapshot-every={EVERY}"]
Ranks = Callable[[], list[int]]


@pytest.mark.parametrize(("stages", "replicas"), [(1, None), (2, None), (1, 4)])
def test_a_rank_that_is_killed_changes_nothing(stages: int, replicas: int | None, tmp_path: Path) -> None:
    """One on another host, where hosts can be made. Two stages, and replicas on two ranks, end as one rank does."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    settings = [*SETTINGS, f"--data=text:{text}", f"--accumulate={stages}"]
    settings += [] if replicas is None else [f"--replicas={replicas}"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    launcher = [*HOROVODRUN, "-np", str(2 // stages if replicas is None else 1), "--gloo"]
    ranks_alone = [*launcher, PROGRAM, "train", *settings, f"--output={undisturbed}"]
    supervised = [PROGRAM, "train", "--max-restarts=2", *settings, f"--pipeline={stages}", f"--output={run}"]
    with _started_here(ranks_alone) as (reference, _), _supervised(supervised) as (job, ranks):
        killed = _ranks_at_the_first_snapshot(run, ranks)
        os.kill(killed[-1], signal.SIGKILL)
        output, errors = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, output + errors
        assert not any(psutil.pid_exists(pid) for pid in killed)
        told = reference.communicate(timeout=SECONDS)
        assert reference.returncode == 0, told
    line = r"^hvd-ckpt: the job ended \(.*\); restart 1 of 2 from step (\d+)$"
    restart = re.findall(line, errors, re.MULTILINE)
    assert len(restart) == 1 and EVERY <= int(restart[0]) < STEPS
    assert f"done after {STEPS} steps: {run}" in output
    last = Path("snapshots") / f"step-{STEPS:08d}"
    weights, expected = read(run / last).weights, read(undisturbed / last).weights
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)


@contextlib.contextmanager
def _supervised(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Ranks]]:
    """The supervisor, and what tells its job's ranks; on two hosts where they can be made."""
    launcher = "horovodrun -np 2 --gloo"
    if unavailable() is not None:
        with _started_here([*command, f"--launcher={launcher}"]) as started:
            yield started
        return
    with Hosts(2) as hosts:
        job = hosts.start("a", [*command, f"--launcher={launcher} -H a:1,b:1"], environment=ENVIRONMENT)
        yield job, lambda: _ranks({**hosts.processes("a"), **hosts.processes("b")})


@contextlib.contextmanager
def _started_here(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Ranks]]:
    job = subprocess.Popen(
        command,
        env={**os.environ, "PATH": f"{Path(PROGRAM).parent}{os.pathsep}{os.environ['PATH']}", **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield job, lambda: _ranks(_below(job.pid))
    finally:
        job.terminate()
        job.communicate()


def _below(pid: int) -> dict[int, str]:
    lines = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines[child.pid] = " ".join(child.cmdline())
    return lines


def _ranks(lines: dict[int, str]) -> list[int]:
    return [
        pid
        for pid, line in lines.items()
        if line.split()[1:3] == [PROGRAM, "train"] and "--max-restarts" not in line
    ]


def _ranks_at_the_first_snapshot(run: Path, ranks: Ranks) -> list[int]:
    limit = time.monotonic() + SECONDS
    while not (run / "snapshots" / f"step-{EVERY:08d}").exists():
        assert time.monotonic() < limit, "there is no snapshot"
        time.sleep(0.01)
    found = ranks()
    assert len(found) == 2
    return found
