"""Jobs with tensor parallelism, over Gloo and MPI: grid, collectives, and a part that dies."""

from __future__ import annotations

import re

import pytest
from controllers import SCRIPTS, probe, run_ranks

pytestmark = pytest.mark.launch


def run(controller: str, processes: int, *arguments: str, **environment: str) -> tuple[int, str]:
    if controller == "mpi" and not probe("mpi").works:
        controller = "gloo"
    return run_ranks(processes, SCRIPTS / "tensor_grid.py", *arguments, controller=controller, **environment)


@pytest.mark.parametrize(
    ("controller", "processes", "stages", "tensor"),
    [
        ("gloo", 4, "1", "2"),
        ("gloo", 4, "2", "2"),
        ("mpi", 4, "1", "4"),
    ],
)
def test_grid_and_collectives(controller: str, processes: int, stages: str, tensor: str) -> None:
    status, output = run(controller, processes, stages, tensor)
    assert status == 0, output
    assert output.count("equal") == processes, output


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_sums_over_the_link_of_devices(controller: str) -> None:
    status, output = run(controller, 4, "2", "2", HVD_CKPT_LINK="gloo")
    assert status == 0, output
    assert output.count("equal") == 4, output


def test_a_part_that_dies_is_named() -> None:
    status, output = run("gloo", 2, "1", "2", "dies")
    assert status != 0
    assert re.search(r"part 1 \(rank 1 on host \S+\) has ended", output), output


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_part_that_hangs_is_named_within_the_stall_timeout(controller: str) -> None:
    status, output = run(controller, 2, "1", "2", "stops")
    assert status != 0
    assert re.search(
        r"rank 0 on host \S+: waited \d+ s for values of part 1 \(rank 1 on host \S+\)", output
    ), output
