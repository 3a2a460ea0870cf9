"""Tests of callbacks of a run: their calls, and failures of one of them."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from controllers import HOROVODRUN

from hvd_ckpt.app.training.callbacks import Callbacks, callbacks_of
from hvd_ckpt.app.training.config import Config

pytestmark = pytest.mark.launch

OWN = """
from pathlib import Path
import hvd_ckpt as hc

class Callback:
    def __init__(self):
        self.heard = []
        self.names = Path(f"heard-{hc.rank()}.txt")
    def on_begin(self, trainer):
        self.heard.append(f"begin {trainer.progress.step}")
    def on_log(self, record):
        self.heard.append(f"log {record['step']}")
        assert record["loss"] > 0
    def on_evaluation(self, record):
        self.heard.append(f"evaluation {record['step']}")
    def on_snapshot(self, path):
        assert (path / "manifest.json").is_file()
        self.heard.append(f"snapshot {path.name[-1]}")
    def on_end(self, outcome):
        self.heard.append(f"end {outcome.steps}")
        self.names.write_text(chr(10).join(self.heard))

class Kernels:
    def on_begin(self, trainer):
        import os, torch
        found = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        Path("kernels.txt").write_text(f"{found} {os.environ.get('CUBLAS_WORKSPACE_CONFIG')}")

class Misspelled:
    def on_log(self, record): pass
    def on_evaluate(self, record): pass

class Needy:
    def __init__(self, path): pass
    def on_log(self, record): pass

class Failing:
    def on_log(self, record):
        if record["step"] == 2:
            raise KeyError("planted in a callback")
    def on_end(self, outcome):
        Path("ended.txt").write_text(str(outcome))
"""
SIZES = "--model gpt-tiny --model-option layers=1 --model-option width=16 --sequence-length 16"
SMALL = f"{SIZES} --batch 2 --data text:text.txt --log-every 1"
SHORT = f"{SMALL} --steps 4 --snapshot-every 2 --eval-every 2 --eval-batches 1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_callback.py").write_text(OWN, "utf-8")
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*HOROVODRUN, "-np", "2", "--gloo", sys.executable, "-m", "hvd_ckpt.app.cli.main", "train"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_the_first_rank_tells_a_callback_of_all_that_happens(folder: Path) -> None:
    done = train(*SHORT.split(), "--callback", "own_callback:Callback", "--output", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "heard-1.txt").exists()
    heard = (folder / "heard-0.txt").read_text().splitlines()
    assert [one for one in heard if not one.startswith("snapshot")] == [
        "begin 0", "log 1", "log 2", "evaluation 2", "log 3", "log 4", "evaluation 4", "end 4",
    ]  # fmt: skip
    assert [one for one in heard if one.startswith("snapshot")] == ["snapshot 2", "snapshot 4"]
    assert heard.index("snapshot 2") > heard.index("evaluation 2") and heard[-2:] == ["snapshot 4", "end 4"]


def test_deterministic_kernels_are_chosen_and_kept_by_a_resumed_run(folder: Path) -> None:
    for arguments in ("--deterministic --steps 1 --output run", "--resume run --steps 2"):
        (folder / "kernels.txt").unlink(missing_ok=True)
        done = train(*SMALL.split(), *arguments.split(), "--callback", "own_callback:Kernels")
        assert done.returncode == 0, done.stdout + done.stderr
        assert (folder / "kernels.txt").read_text() == "(True, False) :4096:8"


def test_an_exception_of_a_callback_ends_all_ranks_with_one_traceback(folder: Path) -> None:
    done = train(*SMALL.split(), "--steps", "999999", "--callback", "own_callback:Failing")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert len(re.findall(r">:KeyError: 'planted in a callback'", said)) == 1, said
    assert len(re.findall(r">:Traceback", said)) == 1, said
    assert (folder / "ended.txt").read_text() == "None"


def test_tensorboard_that_fails_is_a_warning_and_hears_no_more() -> None:
    [board], said, heard = callbacks_of(Config("gpt-tiny", tensorboard=True)), [], []
    own = types.SimpleNamespace(on_log=lambda record: heard.append(record["step"]))
    tell = Callbacks([board, own], said.append)
    tell("on_begin", types.SimpleNamespace())  # without a folder
    for step in (1, 2):
        tell("on_log", {"step": step, "kind": "train", "loss": 1.0})
    tell("on_end", None)
    assert heard == [1, 2] and len(said) == 1 and "TensorBoard" in said[0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("Missing", "no callback 'own_callback:Missing'"),
        ("Path", "own_callback:Path: it has none of the methods on_begin"),
        ("Misspelled", "no method of a callback 'on_evaluate': did you mean 'on_evaluation'"),
        ("Needy", "own_callback:Needy: it is made without arguments: missing a required argument"),
    ],
)
def test_what_cannot_be_called_is_one_line(name: str, said: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        callbacks_of(Config("gpt-tiny", callback=f"own_callback:{name}"))
    assert "\n" not in str(caught.value)
