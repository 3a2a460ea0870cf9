"""``hvd-ckpt train`` as its user runs it: settings from flags and files, a resumed run, one line for what cannot be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from controllers import HOROVODRUN
from safetensors.torch import load_file

from hvd_ckpt.command_line import RANK_VARIABLES
from hvd_ckpt.training.command import train

BIN = Path(sys.executable).parent


def launch(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOROVODRUN, "-np", str(ranks), "--gloo", str(BIN / "hvd-ckpt"), "train", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def test_two_ranks_train_as_a_file_and_flags_say_and_go_on(text: Path, tmp_path: Path) -> None:
    settings = {
        "model": "bert-tiny",
        "model-options": {"width": 32, "layers": 2, "heads": 2},
        "text": str(text),
        "length": 16,
        "steps": 99,
        "batch": 4,
        "accumulate": 2,
        "lr": 1e-3,
        "optimizer-options": {"eps": "1e-6"},
        "log-every": 1,
        "snapshot-every": 2,
        "keep-snapshots": 9,
        "tensorboard": True,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    file = str(tmp_path / "run.yaml")
    first = launch(
        file, "--steps", "4", "--precision", "bf16", "--segments", "2", "--output", str(run), ranks=2
    )
    assert first.returncode == 0, first.stdout + first.stderr
    shown = re.findall(r"step (\d)/4  loss (\S+)  (\S+) tokens/s  lr \S+  peak .* left", first.stderr)
    assert [step for step, _, _ in shown] == ["1", "2", "3", "4"]
    assert f"done after 4 steps: {run}" in first.stdout
    assert list((run / "tensorboard").iterdir()) and (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    whole = load_file(run / "snapshots" / "step-00000004" / "model.safetensors")

    # A run goes on by its own settings, and writes the later steps anew.
    again = launch("--resume", str(run / "snapshots" / "step-00000002"), ranks=2)
    assert again.returncode == 0, again.stdout + again.stderr
    later = re.findall(r"step (\d)/4  loss (\S+) ", again.stderr)
    assert later[:2] == [(step, loss) for step, loss, _ in shown[2:]]
    weights = load_file(run / "snapshots" / "step-00000004" / "model.safetensors")
    assert weights.keys() == whole.keys() and all((weights[name] == whole[name]).all() for name in whole)


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_of_several_ranks_rank_0_alone_says_what_is_wrong_with_a_flag(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_ckpt.command_line.MOMENT", 0.0)
    outputs = []
    for rank in ("0", "1"):
        monkeypatch.setenv(variable, rank)
        result = CliRunner().invoke(train, ["--modle", "bert-tiny"])
        assert result.exit_code == 2
        outputs.append(result.output)
    assert outputs[0].count("No such option '--modle'") == outputs[0].count("\n") == 1
    assert outputs[1] == ""


def test_what_the_run_finds_out_is_said_once_in_one_line(text: Path, tmp_path: Path) -> None:
    result = launch("--model", "bert-tyni", "--output", str(tmp_path / "run"), ranks=2)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "Error: " in line and "RuntimeError" not in line]
    assert len(lines) == 1 and "no model 'bert-tyni': did you mean 'bert-tiny'?" in lines[0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--modle", "bert-tiny"], "No such option '--modle'. (Did you mean one of: '--model'"),
        ([], "model: give one"),
        (["no.yaml"], "cannot read the configuration 'no.yaml': No such file"),
        (["--model", "gpt-tiny", "--model-option", "layers"], "--model-option 'layers': give NAME=VALUE"),
        (["--model", "gpt-tiny", "--batch", "many"], "batch 'many': give a whole number from 1"),
        (["--resume", "nowhere"], "cannot read the configuration 'nowhere/config.yaml'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    assert said in result.output
