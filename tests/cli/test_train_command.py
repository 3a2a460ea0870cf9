"""Tests of the command ``hvd-ckpt train``: settings from flags and files, a resumed run, one line for invalid input."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from controllers import HOROVODRUN, probe
from snapshot_files import digest_of

from hvd_ckpt.app.cli.train import train
from hvd_ckpt.app.training import logs
from hvd_ckpt.processes.launchers import RANK_VARIABLES

pytestmark = pytest.mark.launch

COMMAND = [str(Path(sys.executable).parent / "hvd-ckpt"), "train"]
SMALL = ["--model=gpt-tiny", "--model-option=width=32", "--model-option=layers=1", "--sequence-length=32"]


def launch(*arguments: str, controller: str = "--gloo") -> subprocess.CompletedProcess[str]:
    words = [*HOROVODRUN, "-np", "2", controller, *COMMAND, *arguments]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def losses_of(run: Path) -> list[tuple[int, float]]:
    records = logs.read(run / "log.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def test_two_ranks_train_as_a_file_and_flags_say_and_go_on(text: Path, tmp_path: Path) -> None:
    settings = {"model": "gpt-tiny", "model-options": {"width": 32, "layers": 2, "heads": 2}}
    settings |= {"data": f"text:{text}", "sequence-length": 16, "steps": 99, "batch": 4, "accumulate": 2}
    settings |= {"lr": 1e-3, "optimizer-options": {"eps": "1e-6"}, "tensorboard": True}
    settings |= {"log-every": 10, "snapshot-every": 10, "keep-snapshots": 9}
    file, run = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(settings))
    flags = ["--steps", "30", "--precision", "bf16", "--segments", "2", "--output", str(run)]
    controller = "--mpi" if probe("mpi").works else "--gloo"
    made = launch(str(file), *flags, controller=controller)
    assert made.returncode == 0, made.stdout + made.stderr
    assert re.search(r"step 10/30  loss", made.stderr), made.stderr
    assert f"done after 30 steps: {run}" in made.stdout
    assert list((run / "tensorboard").iterdir())
    losses = losses_of(run)
    assert [step for step, _ in losses] == [1, 10, 20, 30]
    final = run / "snapshots" / "step-00000030"
    whole = digest_of(final)

    # A run goes on by its own settings, and writes the later steps anew.
    again = launch("--resume", str(run / "snapshots" / "step-00000010"))
    assert again.returncode == 0, again.stdout + again.stderr
    shown = re.findall(r"step (\d+)/30  loss \S+  \S+ tokens/s  lr \S+  peak .* left", again.stderr)
    assert shown == ["20", "30"] and "changed " not in again.stderr
    assert losses_of(run) == losses
    assert digest_of(final) == whole

    # What is other than before is said.
    def told(*flags: str) -> str:
        alone = [*COMMAND, "--resume", str(run), "--dry-run", *flags]
        return subprocess.run(alone, capture_output=True, text=True, timeout=300, check=True).stderr

    samples = "samples of a step 4 (was 8; --global-batch 8 keeps them)"
    assert f"changed ranks 1 (was 2); {samples}; lr 0.01 (was 0.001)\n" in told("--lr", "0.01")
    kept = told("--global-batch", "8")
    assert "8 samples on each rank in 2 micro-batches: 8 samples" in kept and "samples of a step" not in kept


def test_a_dry_run_says_what_the_run_is_about_to_do_and_leaves_nothing(text: Path) -> None:
    folder = text.parent / "dry"
    words = [*COMMAND, *SMALL, f"--data=text:{text}", "--batch=2", f"--output={folder}"]
    result = subprocess.run(
        [*words, "--budget=0.5x", "--dry-run"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    told = dict(re.findall(r"(?m)^(model|data|step|steps|set|ranks|folder) +(.*)", result.stderr))
    assert re.fullmatch(r"gpt-tiny: [\d,]+ parameters, .*; fp32", told["model"])
    assert told["data"].startswith(f"text:{text}: ")
    assert "2 samples" in told["step"] and "64 tokens" in told["step"]
    assert "budget 0.5x" in told["set"] and told["ranks"].startswith("1")
    assert told["folder"] == str(folder) and not folder.exists()


@pytest.mark.parametrize(
    ("launcher", "number", "words"),
    [
        ([], signal.SIGINT, r"Ctrl-C \(SIGINT\)"),
        ([*HOROVODRUN, "-np", "2", "--gloo"], signal.SIGTERM, "SIGTERM"),
    ],
    ids=["alone", "launcher"],
)
def test_a_signal_prints_what_happened(launcher, number, words, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*launcher, *COMMAND, *SMALL, f"--data=text:{text}", "--batch=2", "--steps=1000000"]
    with subprocess.Popen(
        [*command, f"--output={run}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        before = []
        for line in process.stderr:
            before.append(line)
            if re.search(r"step +1/", line):
                break
        process.send_signal(number)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == (1 if launcher else 130), "".join(before) + errors
    said = rf"stopped by {words}, with a snapshot, after \d+ steps: (.*)\n.*snapshot: (.*); to resume: (.*)\n"
    ((folder, snapshot, resume),) = re.findall(said, output)
    assert folder == str(run) and resume == f"hvd-ckpt train --resume {run}"
    assert [Path(snapshot)] == list((run / "snapshots").glob("step-*"))


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_of_several_ranks_rank_0_alone_says_what_is_wrong_with_a_flag(variable, monkeypatch) -> None:
    monkeypatch.setattr("hvd_ckpt.app.cli.command_line.MOMENT", 0.0)
    outputs = []
    for rank in ("0", "1"):
        monkeypatch.setenv(variable, rank)
        result = CliRunner().invoke(train, ["--modle", "bert-tiny"])
        assert result.exit_code == 2
        outputs.append(result.output)
    assert outputs[0].count("No such option '--modle'") == outputs[0].count("\n") == 1
    assert outputs[1] == ""


def test_errors_of_a_run_are_printed_once_in_one_line(tmp_path: Path) -> None:
    result = launch("--model", "bert-tyni", "--output", str(tmp_path / "run"))
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "Error: " in line and "RuntimeError" not in line]
    assert len(lines) == 1 and "'bert-tyni': did you mean 'bert-tiny'?" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modle", "bert-tiny"], "No such option '--modle'. Did you mean '--model'?"),
        ([], "model is missing"),
        (["no.yaml"], "'no.yaml': No such file"),
        (["--model", "gpt-tiny", "--model-option", "layers"], "--model-option 'layers': give NAME=VALUE"),
        (["--model", "gpt-tiny", "--batch", "many"], 'batch is "many"'),
        (["--resume", "nowhere"], "'nowhere/config.yaml'"),
        (["--resume", "x" * 300], "config.yaml"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    assert said in result.output
