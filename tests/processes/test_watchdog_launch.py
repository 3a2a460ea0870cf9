"""Tests of ranks that are late or cannot come: they do not block the others forever, and no rank outlives its launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from controllers import NOT_FORKED, SCRIPTS, probe, run_ranks, start_ranks

pytestmark = pytest.mark.launch

SCRIPT = SCRIPTS / "stalled.py"
STOPPED = r"rank 1 \(process \d+ on host .+\) is stopped by a signal: look at its output"
STUCK = r"all ranks are on this host, so a rank is stuck in other work or has gone: look at the other ranks' output"
GRADIENTS = r"the gradients of all ranks \(.*optimizer\.step\(\)\) at stalled.py:\d+"
PARAMETERS = r"the parameters of '0' \(.*gathered_parameters\(\).*\) at stalled.py:\d+"
STILL = r"still waiting, after \d+ s, for"
SECONDS = 400.0
Jobs = dict[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of the job ``orphans`` leave their process ids."""
    return tmp_path_factory.mktemp("orphans")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[Jobs]:
    """All at once: they spend their time waiting. Over MPI, which waits for ever by itself, where it works."""
    running = {case: start_ranks(2, SCRIPT, case) for case in ("alone", "unit", "gone")}
    mpi = probe("mpi").works
    running["stops"] = start_ranks(2, SCRIPT, "stops", controller="mpi" if mpi else "gloo")
    if mpi:
        running["orphans"] = start_ranks(2, SCRIPT, "orphans", str(folder), controller="mpi", **NOT_FORKED)
    yield running
    for job in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("stops", [rf"waited \d+ s for {GRADIENTS}; {STOPPED}", rf"{STILL} {GRADIENTS};"]),
        ("alone", [rf"waited \d+ s for {PARAMETERS}; {STUCK}", rf"{STILL} {PARAMETERS};"]),
        ("unit", [r"ended by [\s\S]*rank 0 waits for the parameters of '2'[\s\S]*units=\[\]"]),
        ("gone", [rf"ended, waiting for {PARAMETERS}, because another rank"]),
    ],
)
def test_a_wait_for_a_rank_that_does_not_come_ends(jobs: Jobs, case: str, said: list[str]) -> None:
    """With what is waited for; a unit that one rank alone uses is named."""
    output, _ = jobs[case].communicate(timeout=SECONDS)
    assert jobs[case].returncode != 0
    assert "rank 1 comes to grief" in output
    for line in said:
        assert len(re.findall(rf"rank 0 on host \S+: {line}", output)) == 1, output
    assert case in ("unit", "gone") or "HorovodInternalError" not in output


def test_ranks_end_with_the_launcher_that_they_were_started_by(jobs: Jobs, folder: Path) -> None:
    """``horovodrun --mpi`` that is killed leaves mpirun and its ranks behind, unless the ranks look."""
    if "orphans" not in jobs:
        pytest.skip("MPI does not work here")
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    ranks = [int(path.name) for path in folder.iterdir()]
    assert all(psutil.pid_exists(rank) for rank in ranks)
    jobs["orphans"].kill()
    wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_start_of_an_elastic_job_ends_as_well() -> None:
    """A rank whose launcher does not tell it of the others ends when the time for hosts and for their meeting is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            **{f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")},
            **{f"HOROVOD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE", "ELASTIC_TIMEOUT")},
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(silent.getsockname()[1]),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "1",
        }
        ended = subprocess.run(
            [sys.executable, "-c", "import hvd_ckpt; hvd_ckpt.init(stall_timeout=0.5)"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert ended.returncode == 1, ended.stderr
    assert re.search(
        r"waited [3-9]\d* s for Horovod to start on all ranks at <string>:1; not all ranks have come",
        ended.stderr,
    )


# ---------------------------------------------------------------------------------------------------- a Horovod that was built here

HOUR = "3600000"  # in milliseconds


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_does_not_wait_for_the_end_of_a_cycle(ranks: int) -> None:
    status, output = run_ranks(ranks, SCRIPTS / "waits.py", "cycle", HOROVOD_CYCLE_TIME=HOUR)
    assert status == 0 and output.count("has all") == ranks, output


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_rank_that_waits_looks_rarely(kind: str, controller: str) -> None:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    status, output = run_ranks(2, SCRIPTS / "waits.py", kind, controller=controller)
    found = re.search(r"sleeps: (\d+)", output)
    # 11 where the sleep ends with the operation, 375 where each look is followed by a pause.
    assert status == 0 and found is not None and int(found[1]) < 60, output
