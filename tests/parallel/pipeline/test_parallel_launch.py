"""Jobs with pipeline stages and parts of layers, over Gloo and MPI: the whole model on each rank, and errors that end all ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from controllers import SCRIPTS, probe, run_ranks

sys.path.append(str(Path(__file__).resolve().parents[2]))
from seeds import Job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
COMMAND = Path(sys.executable).with_name("hvd-ckpt")

pytestmark = pytest.mark.launch


def working(controller: str) -> str:
    return controller if controller == "gloo" or probe(controller).works else "gloo"


def run(controller: str, ranks: int, job: str) -> tuple[int, str]:
    """Runs a script with its arguments, as ``VARIABLE=value script argument ...``."""
    controller = working(controller)
    variables = {"PYTHONPATH": str(SCRIPTS.parent), **dict(re.findall(r"(\S+)=(\S+) ", job))}
    script, *arguments = (word for word in job.split() if "=" not in word)
    return run_ranks(ranks, SCRIPTS / f"{script}.py", *arguments, controller=controller, **variables)


@pytest.mark.parametrize(
    ("controller", "ranks", "job"),
    [
        # With fewer models where only messages and groups differ; more stages: random programs.
        ("gloo", 3, "stages 3 messages"),
        ("gloo", 4, "stages 2"),
        ("mpi", 4, "stages 2 messages"),
        # ``HVD_CKPT_LINK=gloo python -m pytest tests/parallel`` runs all other tests over the link of devices, too.
        ("gloo", 2, "HVD_CKPT_LINK=gloo stages 2 messages"),
        ("gloo", 4, "tensor_grid 1 2"),
        ("gloo", 4, "tensor_grid 2 2"),
        ("mpi", 4, "tensor_grid 1 4"),
        ("gloo", 4, "HVD_CKPT_LINK=gloo tensor_grid 2 2"),
        ("mpi", 4, "HVD_CKPT_LINK=gloo tensor_grid 2 2"),
        ("gloo", 2, "tensor_models 2"),
        ("gloo", 6, "tensor_models 2 gpt"),  # three replicas, whose sums depend on the place of an element
        ("mpi", 4, "tensor_models 4 gpt,BertForMaskedLM"),
        ("gloo", 2, "tensor_models 2 gpt,roberta,BertForMaskedLM,GPT2LMHeadModel sequence"),
        ("gloo", 2, "tensor_kinds 2"),
        ("gloo", 4, "tensor_kinds 2 inside,sharded"),
        ("mpi", 4, "tensor_kinds 4 inside,memory,order"),
        ("gloo", 2, "tensor_modes 2"),
        ("gloo", 4, "tensor_modes 2 sequence"),
        ("mpi", 4, "tensor_modes 4 whole_states,overflow,head"),
    ],
)
def test_all_ranks_find_what_the_whole_model_gives(controller: str, ranks: int, job: str) -> None:
    status, output = run(controller, ranks, job)
    assert status == 0, output
    assert output.count("equal") == ranks, output


WAITED = r"rank 0 on host \S+: waited \d+ s for "


@pytest.mark.parametrize(
    ("controller", "job", "named"),
    [
        ("gloo", "stages 2 hangs", rf"{WAITED}.* stage 1 \(rank 1 on host \S+\)"),
        ("mpi", "stages 2 hangs before clipping", rf"{WAITED}.* stage 1 \(rank 1 on host \S+\)"),
        ("gloo", "tensor_grid 1 2 stops", rf"{WAITED}values of part 1 \(rank 1 on host \S+\)"),
        ("mpi", "tensor_grid 1 2 stops", rf"{WAITED}values of part 1 \(rank 1 on host \S+\)"),
        ("gloo", "tensor_grid 1 2 dies", r"part 1 \(rank 1 on host \S+\) has ended"),
        ("gloo", "stages 2 differ", "ValueError.*random states"),
        ("gloo", "stages 2 other batch", "ValueError.*different batches"),
    ],
)
def test_a_stage_or_part_that_hangs_or_ends_is_named(controller: str, job: str, named: str) -> None:
    """Within the stall timeout."""
    status, output = run(controller, 2, job)
    assert status != 0
    assert re.search(named, output), output


def test_an_error_on_one_stage_ends_all_with_one_traceback() -> None:
    """Over MPI: training/test_launch.py."""
    status, output = run("gloo", 2, "stages 2 raises")
    assert status != 0
    assert len(re.findall(r"Traceback.*\n(?:.*\n)*?.*ArithmeticError: the last stage raises", output)) == 1
    other = r"Traceback(?!(.*\n)*.*ArithmeticError|(.*\n)*.*Horovod detected)"
    assert re.search(other, output) is None, output


@pytest.mark.parametrize(
    ("kind", "ranks", "parts", "controller", "seeds"),
    [
        ("stages", 3, 3, "gloo", range(100_003, 100_007)),
        ("stages", 4, 2, "mpi", range(100_003, 100_007)),
        ("recipes", 2, 2, "gloo", range(300_000, 300_025)),  # or are refused
    ],
)
def test_random_programs(kind: str, ranks: int, parts: int, controller: str, seeds: range) -> None:
    found = Job(kind, ranks, parts, working(controller), 60.0).run(seeds)
    assert not found.failures and len(found.done) == len(seeds)


def test_the_example_learns_in_parts() -> None:
    status, output = run_ranks(4, EXAMPLES / "tensor_gpt.py", "--steps", "40", controller="gloo")
    assert status == 0, output
    assert "2 replicas of 2 parts" in output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.8 * losses[0], output


def test_the_command_trains_in_parts_and_resumes_in_one(tmp_path: Path) -> None:
    data, folder = tmp_path / "text.txt", tmp_path / "run"
    data.write_bytes(bytes(range(32, 127)) * 20)
    first = "train --model gpt-tiny --model-option dropout=0.1 --batch 2 --sequence-length 16 --clip 0.5 --tensor=2 --steps=4"
    first += f" --data text:{data} --output {folder}"
    resumed = f"train --resume {folder} --tensor=1 --steps=6"
    for ranks, command, told in (
        (2, first, "tensor 2"),
        (1, resumed, "after 6 steps"),
    ):
        status, output = run_ranks(ranks, COMMAND, *command.split(), controller="gloo")
        assert status == 0, output
        assert told in output
