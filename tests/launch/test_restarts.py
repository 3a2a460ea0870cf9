"""``hvd-ckpt train --max-restarts``: a job one of whose ranks is killed ends with the weights of one that was not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hosts import Hosts, unavailable
from safetensors.torch import load_file

PROGRAM = str(Path(sys.executable).parent / "hvd-ckpt")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # else a host of one rank computes with more threads than one of two
STEPS, EVERY = 240, 20
SECONDS = 200.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    model = [
        "--model=gpt-tiny",
        "--model-option=width=32",
        "--model-option=layers=2",
        "--model-option=heads=2",
    ]
    data = [f"--text={text}", "--length=16", "--batch=4"]
    return [*model, *data, f"--steps={STEPS}", f"--snapshot-every={EVERY}", "--log-every=1000"]


@pytest.fixture(scope="module")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = subprocess.run(
        _command(run, settings, "horovodrun -np 2 --gloo", 0),
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run


def test_a_rank_that_is_killed_changes_nothing(
    settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = subprocess.Popen(
        _command(run, settings, "horovodrun -np 2 --gloo", 2),
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        ranks = _after_the_first_snapshot(run, lambda: _ranks(job.pid))
        os.kill(ranks[1], signal.SIGKILL)
        _check_end(job, run, undisturbed)
        assert not any(psutil.pid_exists(pid) for pid in ranks)
    finally:
        job.terminate()
        job.communicate()


def test_a_rank_that_is_killed_on_another_host_changes_nothing(
    settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    run = tmp_path / "run"
    with Hosts(2) as hosts:
        job = hosts.start(
            "a", _command(run, settings, "horovodrun -np 2 --gloo -H a:1,b:1", 2), environment=ENVIRONMENT
        )
        ranks = _after_the_first_snapshot(
            run, lambda: [pid for pid, line in hosts.processes("b").items() if _is_rank(line)]
        )
        os.kill(ranks[0], signal.SIGKILL)
        _check_end(job, run, undisturbed)


def _command(run: Path, settings: list[str], launcher: str, restarts: int) -> list[str]:
    restarting = ["--max-restarts", str(restarts), "--launcher", launcher]
    return [PROGRAM, "train", *restarting, *settings, "--output", str(run)]


def _is_rank(line: str) -> bool:
    words = line.split()
    return len(words) > 2 and words[1:3] == [PROGRAM, "train"]


def _ranks(supervisor: int) -> list[int]:
    """Process ids in order of the ranks."""
    children = psutil.Process(supervisor).children(recursive=True)
    ranks = [child for child in children if _is_rank(" ".join(child.cmdline()))]
    return [child.pid for child in sorted(ranks, key=lambda child: int(child.environ()["HOROVOD_RANK"]))]


def _after_the_first_snapshot(run: Path, ranks: Callable[[], list[int]]) -> list[int]:
    limit = time.monotonic() + SECONDS
    while not (run / "snapshots" / f"step-{EVERY:08d}").exists():
        assert time.monotonic() < limit, "there is no snapshot"
        time.sleep(0.01)
    return ranks()


def _check_end(job: subprocess.Popen[str], run: Path, undisturbed: Path) -> None:
    output, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, output + errors
    restart = re.findall(
        r"^hvd-ckpt: the job ended \(.*\); restart 1 of 2 from step (\d+)$", errors, re.MULTILINE
    )
    assert len(restart) == 1 and EVERY <= int(restart[0]) < STEPS
    assert f"done after {STEPS} steps: {run}" in output
    last = Path("snapshots") / f"step-{STEPS:08d}" / "model.safetensors"
    assert (run / last).exists()
    weights, expected = load_file(run / last), load_file(undisturbed / last)
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in expected)
