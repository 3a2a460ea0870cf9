"""Tests of Horovod's cycle over Gloo: it begins when there is something to send."""

from __future__ import annotations

import pytest
from controllers import SCRIPTS, run_ranks

pytestmark = pytest.mark.launch

HOUR = "3600000"  # in milliseconds


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_does_not_wait_for_the_end_of_a_cycle(ranks: int) -> None:
    status, output = run_ranks(ranks, SCRIPTS / "one_cycle.py", HOROVOD_CYCLE_TIME=HOUR)
    assert status == 0 and output.count("has all") == ranks, output
