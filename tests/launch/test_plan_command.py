"""``hvd-ckpt plan`` as its user runs it: tables, files, pictures, exit status, models, bad arguments."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from hvd_ckpt.planning.blocks import find_blocks
from hvd_ckpt.planning.command import plan
from hvd_ckpt.planning.models import MODELS, build
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.planning.profile import Step

OWN = """
import torch

class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.narrow(torch.nn.functional.gelu(self.wide(hidden)))

def make(batch=256, width=32):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Layer(width) for _ in range(6)])
    return model, (torch.randn(batch, width),), lambda output: output.square().mean()

def broken(batch=1):
    return torch.nn.Linear(1, 1)

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "own_model_to_plan.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> subprocess.CompletedProcess[str]:
    """A plan for half of the memory, beside PyTorch's own checkpointing."""
    command = ["plan", "--model", "own_model_to_plan:make", "--batch", "512", "--budget", "0.5x", "--peers"]
    return subprocess.run(
        [sys.executable, "-m", "hvd_ckpt.cli", *command, "--output", str(folder / "made")],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)

    def invoke(*arguments: str, model: str = "own_model_to_plan:make") -> Result:
        return CliRunner().invoke(plan, ["--model", model, *arguments])

    return invoke


def error_of(result: Result) -> str:
    """The one line of a bad argument."""
    assert result.exit_code == 2, result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    return result.output


def picture_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_the_plan_is_shown_written_and_drawn(made: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert made.returncode == 0, made.stdout + made.stderr
    assert "does not run" not in made.stderr
    written = Plan.load(folder / "made" / "plan.json")
    assert [block.name for block in written.blocks] == list("012345")
    assert written.sample == (("float32", (512, 32)),)
    assert written.measured is not None and written.budget is not None
    assert written.measured.peak_bytes <= written.budget
    assert written.budget == pytest.approx(written.keep_everything.peak_bytes / 2, abs=1)
    for title in ("block", "choice", "kept MiB", "added ms", "peak MiB", "step ms"):
        assert title in made.stdout
    covered = 0
    for row in re.findall(r"^ +\d(?: \.\. \d \((\d) blocks\))? {2,}\S", made.stdout, re.MULTILINE):
        covered += int(row or 1)
    assert covered == 6
    for line in (
        "budget",
        "this plan, predicted",
        "this plan, measured",
        "keep everything, measured",
        "smallest peak, predicted",
    ):
        assert re.search(rf"^ +{line} +\d", made.stdout, re.MULTILINE)
    for title, name in (("Plan", "plan.json"), ("Frontier", "frontier.png"), ("Timeline", "timeline.png")):
        assert f"{title}: {folder / 'made' / name}\n" in made.stdout
    for name in ("frontier.png", "timeline.png"):
        width, height = picture_size(folder / "made" / name)
        assert width > 800 and height > 400


def test_a_plan_is_loaded_and_measured_and_status_1_says_that_it_is_over_budget(
    made: subprocess.CompletedProcess[str], folder: Path, run
) -> None:
    file = str(folder / "made" / "plan.json")
    result = run("--batch", "512", "--load", file, "--output", "loaded")
    assert result.exit_code == 0, result.output
    loaded, before = Plan.load("loaded/plan.json"), Plan.load(file)
    assert loaded.measured is not None and before.measured is not None
    assert loaded.measured.peak_bytes == before.measured.peak_bytes
    assert dataclasses.replace(loaded, measured=before.measured, timelines=before.timelines) == before
    result = run("--batch", "512", "--load", file, "--budget", "1KiB", "--output", "over")
    assert result.exit_code == 1
    assert f"{before.measured.peak_bytes - 1024} bytes over its budget of 1024" in result.output
    assert Path("over/plan.json").exists()
    result = run("--batch", "64", "--load", file, "--output", "smaller")
    assert result.exit_code == 0
    assert "made for float32[512, 32], the batch is float32[64, 32]: predictions do not hold" in result.output


def test_a_file_that_cannot_be_used_is_one_line(
    made: subprocess.CompletedProcess[str], folder: Path, run
) -> None:
    file = folder / "made" / "plan.json"
    wider = error_of(run("--width", "16", "--load", str(file)))
    assert "parameter 0 of block '0' has the shape [64, 16], the plan was made for [128, 32]" in wider
    content = json.loads(file.read_text())
    content["blocks"][2]["kept_bytes"] = -1
    Path("hostile.json").write_text(json.dumps(content))
    assert "blocks[2].kept_bytes is -1" in error_of(run("--load", "hostile.json"))
    assert "cannot read 'nothing.json': No such file" in error_of(run("--load", "nothing.json"))
    assert not Path("runs").exists()


def test_bad_arguments_are_one_line(run) -> None:
    for arguments, says in (
        (("--budget", "plenty"), "--budget: budget must be bytes, or text like '6GiB'"),
        (("--budget", "0x"), "--budget: "),
        (
            ("--layers", "3"),
            "--layers 3: the model own_model_to_plan:make has none, it takes --batch, --width",
        ),
        (("--batch", "0"), "--batch"),
        (("--device", "tpu"), "--device: 'tpu'"),
        (("--device", "cuda:99"), "--device: there is no cuda:99 here"),
        (("--precision", "fp8"), "fp8"),
        (("--output", "."), "is not empty"),
    ):
        assert says in error_of(run(*arguments))
    for model, says in (
        ("gpt5", "no model 'gpt5': choose one of gpt, lstm, bert"),
        ("no_such_module_here:make", "no model 'no_such_module_here:make'"),
        ("own_model_to_plan:nothing", "nothing"),
        ("own_model_to_plan:number", "is a int and no function"),
        (
            "own_model_to_plan:broken",
            "returned Linear, and must return (model, tuple of sample arguments, loss or None)",
        ),
    ):
        assert says in error_of(run(model=model))
    assert "--size tiny: the model bert has the sizes small, base" in error_of(
        run("--size", "tiny", model="bert")
    )
    assert "--pixels 8: the model lstm has none" in error_of(run("--pixels", "8", model="lstm"))


def test_a_budget_that_cannot_be_met_is_one_line_with_the_smallest(run) -> None:
    message = error_of(run("--budget", "10KiB", "--output", "impossible"))
    assert "No plan stays within a budget of 10.00 KiB: the smallest peak" in message
    assert "Give a larger budget or a smaller batch." in message


TINY = {
    "gpt": {"length": 16, "width": 32, "layers": 3},
    "lstm": {"length": 8, "width": 16, "layers": 3},
    **{name: {"length": 8, "width": 32, "layers": 3} for name in ("bert", "roberta", "xlnet", "gpt2")},
    "densenet-22": {"pixels": 8},
    "densenet-121": {"pixels": 32},
    "resnet-18": {"pixels": 8},
}


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_model_has_a_step_and_a_chain_of_blocks(name: str) -> None:
    job = build(name, {"batch": 2, **TINY[name]})
    step = Step(job.model, job.sample, {}, job.loss, None)
    step.run()
    blocks, _ = find_blocks(job.model, step.forward)
    layers = {"densenet-22": 9, "densenet-121": 58, "resnet-18": 8}.get(name, 3)
    assert len(blocks) >= layers
    again = build(name, {"batch": 2, **TINY[name]}).model.state_dict()
    once_more = build(name, {"batch": 2, **TINY[name]}).model.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in once_more.items())


def test_the_names_are_those_promised() -> None:
    assert {
        "gpt",
        "lstm",
        "bert",
        "roberta",
        "xlnet",
        "gpt2",
        "densenet-100",
        "densenet-121",
        "resnet-18",
    } <= set(MODELS)
