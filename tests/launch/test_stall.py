"""A rank that does not come, or cannot, does not keep the others for ever; nor do ranks outlive their launcher."""

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

from hvd_ckpt.probe import find_launcher, probe

SCRIPT = Path(__file__).parent / "scripts" / "stalled.py"
CASES = (("gloo", "stops"), ("mpi", "stops"), ("mpi", "stays_away"), ("gloo", "polls"))
STOPPED = r"rank 1 \(process \d+ on host .+\) is stopped by a signal: look at its output"
STUCK = r"all ranks are on this host, so a rank is stuck in other work or has gone: look at the other ranks' output"
Jobs = dict[tuple[str, str], "subprocess.Popen[str]"]


def start(controller: str, *arguments: str) -> subprocess.Popen[str]:
    launcher = find_launcher()
    assert launcher is not None
    return subprocess.Popen(
        [*launcher, "-np", "2", f"--{controller}", sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """All at once: they spend their time waiting."""
    mpi = probe("mpi").works
    running = {case: start(*case) for case in CASES if case[0] == "gloo" or mpi}
    yield running
    for job in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("case", "waited_for", "reason"),
    [
        (("gloo", "stops"), r"a collective 'hvd_ckpt\S+' at stalled.py:\d+", STOPPED),
        (("mpi", "stops"), r"a collective 'hvd_ckpt\S+' at stalled.py:\d+", STOPPED),
        (("mpi", "stays_away"), r"a collective 'hvd_ckpt\S+' at stalled.py:\d+", STUCK),
        (("gloo", "polls"), r"a collective at stalled.py:\d+", STUCK),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_wait_for_a_rank_that_does_not_come_ends(
    jobs: Jobs, case: tuple[str, str], waited_for: str, reason: str
) -> None:
    if case not in jobs:
        pytest.skip("MPI does not work here")
    output, _ = jobs[case].communicate(timeout=120)
    assert jobs[case].returncode != 0
    assert "rank 1 comes to grief" in output
    lines = re.findall(rf"rank 0 on host \S+: waited \d+ s for {waited_for}; {reason}", output)
    assert len(lines) == 1, output
    assert "HorovodInternalError" not in output


def test_ranks_end_with_the_launcher_that_they_were_started_by(tmp_path: Path) -> None:
    """``horovodrun --mpi`` that is killed leaves mpirun and its ranks behind, unless the ranks look."""
    if not probe("mpi").works:
        pytest.skip("MPI does not work here")
    launcher = start("mpi", "orphans", str(tmp_path))
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        ranks = [int(path.name) for path in tmp_path.iterdir()]
        assert all(psutil.pid_exists(rank) for rank in ranks)
        launcher.kill()
        launcher.wait(10)
        wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
