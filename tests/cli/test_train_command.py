"""``hvd-ckpt train`` as its user runs it: settings from flags and files, a resumed run, one line for what cannot be."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from controllers import HOROVODRUN, probe
from safetensors.torch import load_file

from hvd_ckpt.cli.train import train
from hvd_ckpt.command_line import RANK_VARIABLES
from hvd_ckpt.planning.plan import Plan
from hvd_ckpt.text import show_bytes
from hvd_ckpt.training import logs

pytestmark = pytest.mark.launch

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
        "sequence-length": 16,
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


SMALL = (
    "--model",
    "gpt-tiny",
    "--model-option",
    "width=32",
    "--model-option",
    "layers=1",
    "--sequence-length",
    "32",
)


def test_a_dry_run_says_what_the_run_is_about_to_do_and_leaves_nothing(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = launch(
        *SMALL,
        "--text",
        str(text),
        "--batch",
        "4",
        "--budget",
        "0.5x",
        "--output",
        str(run),
        "--dry-run",
        ranks=2,
    )
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"(?:<stderr>:)?(model|data|step|steps|memory|ranks|folder) +(.*)", result.stderr)
    told = dict(lines)
    assert len(told) == len(lines) == 7  # of one rank
    assert re.fullmatch(r"gpt-tiny: [\d,]+ parameters, .*; fp32", told["model"])
    assert told["data"].startswith(f"{text}: ")
    assert told["step"] == "4 samples on each rank: 8 samples, 256 tokens"
    assert "0.5x" in told["memory"] and told["ranks"].startswith("2 over gloo, on ")
    assert told["folder"] == str(run) and not run.exists()


def test_a_run_logs_its_first_step_its_perplexity_and_the_peak_its_budget_is_about(
    text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [
        str(BIN / "hvd-ckpt"),
        "train",
        *SMALL,
        "--text",
        str(text),
        "--batch",
        "2",
        "--eval-batches",
        "2",
    ]
    result = subprocess.run(
        [*command, "--budget", "0.9x", "--steps", "3", "--output", str(run)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("model ")
    records = logs.read(run / "log.jsonl")
    assert [(record["step"], record["kind"]) for record in records] == [
        (1, "train"),
        (3, "train"),
        (3, "eval"),
    ]
    assert records[2]["perplexity"] == pytest.approx(math.exp(records[2]["loss"]))
    assert records[2]["samples"] == 4
    assert re.search(r"^step 3/3  evaluation  .*perplexity \S+  over 4 samples$", result.stderr, re.MULTILINE)
    plan = Plan.load(run / "plan.json")
    peak, budget = show_bytes(plan.measured.peak_bytes), show_bytes(plan.budget)
    assert f"step's peak {peak} of {budget} budgeted  0:00:" in result.stderr


@pytest.mark.parametrize(
    ("supervisor", "said"),
    [
        ((), r"stopped by Ctrl-C \(SIGINT\), with a snapshot, after \d+ steps: (.*)\n"),
        (
            ("--max-restarts", "1"),
            r"stopped by hvd-ckpt, which a signal told to, with a snapshot, after \d+ steps: (.*)\n",
        ),
    ],
)
def test_who_presses_ctrl_c_is_told_what_happened(
    supervisor: tuple[str, ...], said: str, text: Path, tmp_path: Path
) -> None:
    command = [str(BIN / "hvd-ckpt"), "train", *SMALL, "--text", str(text), "--batch", "2", *supervisor]
    with subprocess.Popen(
        [*command, "--steps", "1000000", "--output", str(tmp_path / "run")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if re.match(r"step +1/", line):
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 130, "".join(lines) + errors
    found = re.search(said, output)
    assert found is not None and found[1] == str(tmp_path / "run"), output
    assert list((tmp_path / "run" / "snapshots").glob("step-*"))
    if supervisor:
        assert "stopped by Ctrl-C (SIGINT): not launched again" in errors


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_rank_0_draws_its_live_line_on_the_launchers_terminal(
    controller: str, text: Path, tmp_path: Path
) -> None:
    if not probe(controller).works:
        pytest.skip(f"{controller} does not work here")
    command = [*HOROVODRUN, "-np", "2", f"--{controller}", str(BIN / "hvd-ckpt"), "train", *SMALL]
    command += [
        "--text",
        str(text),
        "--steps",
        "30",
        "--log-every",
        "10",
        "--batch",
        "2",
        "--output",
        str(tmp_path / "run"),
    ]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # that nobody has the other end any more
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
    told = shown.decode()
    assert process.returncode == 0, told
    assert re.search(r"\r\x1b\[2Kstep +\d+/30  loss", told), told  # drawn over the line before
    assert re.search(r"<stderr>:step +\d+/", told) is None
    assert f"done after 30 steps: {tmp_path / 'run'}" in told


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
        ([], "model is missing"),
        (["no.yaml"], "cannot read the configuration 'no.yaml': No such file"),
        (["--model", "gpt-tiny", "--model-option", "layers"], "--model-option 'layers': give NAME=VALUE"),
        (["--model", "gpt-tiny", "--batch", "many"], 'batch is "many"'),
        (["--resume", "nowhere"], "cannot read the configuration 'nowhere/config.yaml'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    assert said in result.output
