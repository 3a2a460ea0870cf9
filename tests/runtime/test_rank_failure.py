"""A rank that raises ends the whole job, with its own traceback, and nothing hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from controllers import HOROVODRUN, probe

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "raise_in_forward.py"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_rank_that_raises_ends_the_job(controller: str) -> None:
    if controller == "mpi" and not probe("mpi").works:
        pytest.skip("MPI does not work here")
    result = subprocess.run(
        [*HOROVODRUN, "-np", "2", f"--{controller}", sys.executable, str(SCRIPT)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode != 0
    said = re.sub(
        r"\[1,\d\]<std(out|err)>:", "", result.stdout
    )  # mpirun may put its tag in the middle of a line
    assert said.count("ValueError: planted on rank 1") == 1, result.stdout
    assert "raise ValueError(" in said
    assert "rank 0 finished step 1" in said
    assert "finished step 2" not in said
    assert "did not end the job" not in said
