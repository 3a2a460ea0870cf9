"""Tensor parallelism, over Gloo and MPI: models, and everything that goes together with it."""

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


def run(controller: str, processes: int, script: str, *arguments: str) -> None:
    if controller == "mpi" and not probe("mpi").works:
        controller = "gloo"
    status, output = run_ranks(processes, SCRIPTS / f"{script}.py", *arguments, controller=controller)
    assert status == 0, output
    assert output.count("equal") == processes, output


@pytest.mark.parametrize(
    ("controller", "processes", "tensor", "models"),
    [
        ("gloo", 2, "2", ()),
        ("gloo", 6, "2", ("gpt",)),  # three replicas, whose sums depend on the place of an element
        ("mpi", 4, "4", ("gpt,BertForMaskedLM",)),
        ("gloo", 2, "2", ("gpt,roberta,BertForMaskedLM,GPT2LMHeadModel", "sequence")),
    ],
)
def test_models_train_like_the_whole_model(
    controller: str, processes: int, tensor: str, models: tuple[str, ...]
) -> None:
    run(controller, processes, "tensor_models", "1", tensor, *models)


@pytest.mark.parametrize(
    ("controller", "processes", "arguments"),
    [
        ("gloo", 2, ("2",)),
        ("gloo", 4, ("2", "inside,sharded")),
        ("mpi", 4, ("4", "inside,memory,order")),
    ],
)
def test_what_runs_between_split_layers_is_as_in_the_whole_model(
    controller: str, processes: int, arguments: tuple[str, ...]
) -> None:
    run(controller, processes, "tensor_kinds", *arguments)


@pytest.mark.parametrize(
    ("controller", "processes", "arguments"),
    [
        ("gloo", 2, ("2",)),
        ("gloo", 4, ("2", "sequence")),
        ("mpi", 4, ("4", "whole_states,overflow,head")),
    ],
)
def test_together_with_all_else(controller: str, processes: int, arguments: tuple[str, ...]) -> None:
    run(controller, processes, "tensor_modes", *arguments)


def test_drawn_models_train_like_the_whole_model_or_are_refused() -> None:
    found = Job("recipes", 2, 2, "gloo", 60.0, False).run(range(300_000, 300_025))
    assert not found.failures and len(found.done) == 25


def test_the_example_learns_in_parts() -> None:
    status, output = run_ranks(4, EXAMPLES / "tensor_gpt.py", "--steps", "40", controller="gloo")
    assert status == 0, output
    assert "2 replicas of 2 parts" in output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.8 * losses[0], output


def test_the_command_trains_in_parts_and_resumes_in_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 20)
    settings = "train --model gpt-tiny --model-option dropout=0.1 --batch 2 --sequence-length 16 --clip 0.5"
    command = [
        *settings.split(),
        "--data",
        f"text:{tmp_path / 'text.txt'}",
        "--output",
        str(tmp_path / "run"),
    ]
    status, output = run_ranks(2, COMMAND, *command, "--tensor=2", "--steps=4", controller="gloo")
    assert status == 0, output
    assert "1 x 2 (replicas x parts of a layer)" in output
    status, output = run_ranks(
        1, COMMAND, "train", "--resume", str(tmp_path / "run"), "--tensor=1", "--steps=6", controller="gloo"
    )
    assert status == 0, output
    assert "after 6 steps" in output
