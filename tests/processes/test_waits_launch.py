"""Tests of waits with the Horovod of ``hvd-ckpt build-horovod``: for other ranks, not for a cycle or the next look."""

from __future__ import annotations

import re

import pytest
from controllers import SCRIPTS, probe, run_ranks

pytestmark = pytest.mark.launch

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
