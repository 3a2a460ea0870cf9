"""Jobs with pipeline stages, over Gloo and MPI: the bits of the whole model on each rank, and errors that end all ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from controllers import SCRIPTS, probe, run_ranks

sys.path.append(str(Path(__file__).resolve().parents[2]))
from seeds import Job

pytestmark = pytest.mark.launch

SCRIPT = SCRIPTS / "stages.py"


def run(controller: str, processes: int, *arguments: str, **environment: str) -> tuple[int, str]:
    if controller == "mpi" and not probe("mpi").works:
        controller = "gloo"
    return run_ranks(processes, SCRIPT, *arguments, controller=controller, **environment)


@pytest.mark.parametrize(
    ("controller", "processes", "arguments"),
    [("gloo", 3, ("3", "messages")), ("gloo", 4, ("2",)), ("mpi", 4, ("2", "messages"))],
)
def test_stages_train_like_the_whole_model(
    controller: str, processes: int, arguments: tuple[str, ...]
) -> None:
    """With fewer models where only messages and groups differ; more stages: :func:`test_random_programs`."""
    status, output = run(controller, processes, *arguments)
    assert status == 0, output
    assert output.count("equal") == processes, output


def test_stages_over_the_link_of_devices_train_like_the_whole_model() -> None:
    """``HVD_CKPT_LINK=gloo python -m pytest tests/parallel`` runs all other tests over it, too."""
    status, output = run("gloo", 2, "2", "messages", HVD_CKPT_LINK="gloo")
    assert status == 0, output
    assert output.count("equal") == 2, output


def test_an_error_on_one_stage_ends_all_with_one_traceback() -> None:
    """Over MPI: training/test_stages_launch.py."""
    status, output = run("gloo", 2, "2", "raises")
    assert status != 0
    assert len(re.findall(r"Traceback.*\n(?:.*\n)*?.*ArithmeticError: the last stage raises", output)) == 1
    assert re.search(r"Traceback(?!(.*\n)*.*ArithmeticError|(.*\n)*.*Horovod detected)", output) is None, (
        output
    )


@pytest.mark.parametrize(("ranks", "stages", "controller"), [(3, 3, "gloo"), (4, 2, "mpi")])
def test_random_programs(ranks: int, stages: int, controller: str) -> None:
    controller = controller if probe(controller).works else "gloo"
    found = Job("stages", ranks, stages, controller, 60.0, False).run(range(100_003, 100_007))
    assert not found.failures and len(found.done) == 4


@pytest.mark.parametrize(("controller", "case"), [("gloo", "hangs"), ("mpi", "hangs before clipping")])
def test_a_stage_that_hangs_is_named_within_the_stall_timeout(controller: str, case: str) -> None:
    status, output = run(controller, 2, "2", case)
    assert status != 0
    assert re.search(r"rank 0 on host \S+: waited \d+ s for .* stage 1 \(rank 1 on host \S+\)", output), (
        output
    )


def test_float16_gradients_of_one_stage_are_refused_on_all() -> None:
    status, output = run("gloo", 4, "2", "float16")
    assert status == 0, output
    assert output.count("equal") == 4, output


def test_stages_that_differ_are_refused() -> None:
    status, output = run("gloo", 2, "2", "differ")
    assert status != 0
    assert re.search(r"other chunks are refused: .*chunks .*\b5 on rank 1", output), output
    assert re.search("other values are refused: .*'embedding.tokens.weight'", output), output
    assert re.search("ValueError.*random states", output), output
    assert "stages=3 does not divide the number of processes, 2" in output


@pytest.mark.parametrize(("controller", "processes"), [("gloo", 2), ("mpi", 4)])
def test_arguments_of_one_process_are_refused_on_all(controller: str, processes: int) -> None:
    script = SCRIPT.with_name("stages_apart.py")
    if controller == "mpi" and not probe("mpi").works:
        controller = "gloo"
    status, output = run_ranks(processes, script, controller=controller)
    assert status == 0, output
    assert output.count("refused") == processes, output
