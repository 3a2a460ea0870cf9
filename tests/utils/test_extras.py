"""Tests of missing optional packages and Horovod: one line with the way to install each, and everything else works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import Case, Result, run_forked

pytestmark = pytest.mark.launch

OPTIONAL = ("matplotlib", "mpi4py", "PIL", "sklearn", "tensorboard", "tokenizers", "transformers")
COMMANDS = ("compare", "export", "plan", "train")
IMPORTS = """
import importlib.metadata, json, sys
from click.testing import CliRunner
from hvd_ckpt.app.cli.main import main
from hvd_ckpt.utils import extras
"""
CALL = """
sys.modules.update(dict.fromkeys({absent!r}))
extras.importlib.metadata.requires = lambda name: {requires!r}
extras.pip_command = lambda extra: f"pip install 'here[{{extra}}]'"
results = [CliRunner().invoke(main, command) for command in {commands!r}]
print(json.dumps([(result.exit_code, result.output) for result in results]))
"""
TRAIN = "import os; os.chdir({folder!r}); sys.modules.update(dict.fromkeys({absent!r})); main(sys.argv[1:])"
LIBRARY = """
sys.modules['horovod'] = None
import hvd_ckpt
for name in ('init', 'DistributedOptimizer', 'allreduce'):
    try:
        getattr(hvd_ckpt, name)
    except ImportError as error:
        print(error)
"""


class Answer(NamedTuple):
    status: int
    output: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extras")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    """Commands in processes that cannot import some packages."""

    def call(absent: tuple[str, ...], *commands: list[str]) -> Case:
        return Case(CALL.format(absent=absent, requires=declared(), commands=commands))

    def train(model: str) -> Case:
        options = f"train --model {model} --data text:text.txt --steps 1 --batch 2 --sequence-length 16 --output {model}"
        return Case(TRAIN.format(folder=str(folder), absent=OPTIONAL), arguments=tuple(options.split()))

    (folder / "text.txt").write_text("the cat sat on the mat\n" * 400)
    planned = ["plan", "--model", "bert-tiny", "--budget", "0.5x"]
    each = [[name, "x"] for name in COMMANDS]
    cases = {
        "horovod": call(("horovod",), *each),
        "torch": call(("torch",), *each),
        "library": Case(LIBRARY),
        "optional": call(OPTIONAL, planned, ["compare", "--quick"]),
        "bert-tiny": train("bert-tiny"),
        "gpt-tiny": train("gpt-tiny"),
    }
    return run_forked(IMPORTS, cases)


def answers_of(result: Result) -> list[Answer]:
    assert result.returncode == 0, result.stderr
    return [Answer(*answer) for answer in json.loads(result.stdout.splitlines()[-1])]


def declared() -> list[str]:
    """What setup.cfg declares, as the metadata of an installed package has it."""
    import configparser

    config = configparser.ConfigParser()
    config.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    return [
        f'{line.split(";")[0].strip()}; extra == "{extra}"'
        for extra, lines in config["options.extras_require"].items()
        for line in lines.split("\n")
        if line.strip()
    ]


def test_without_optional_packages(results: dict[str, Result]) -> None:
    plan, compare = answers_of(results["optional"])
    for answer, package in ((plan, "transformers"), (compare, "sklearn")):
        assert answer.status == 2, answer.output
        (line,) = [line for line in answer.output.splitlines() if line.startswith("Error:")]
        assert f"{package} is not installed: pip install 'here[training]'" in line


@pytest.mark.parametrize(
    ("model", "status", "package"), [("bert-tiny", 2, "transformers"), ("gpt-tiny", 0, "")]
)
def test_training_without_optional_packages(
    results: dict[str, Result], folder: Path, model: str, status: int, package: str
) -> None:
    """A run that needs one ends with one line."""
    said = results[model].stdout + results[model].stderr
    assert results[model].returncode == status, said
    assert (f"{package} is not installed" in said) is bool(package) and "Traceback" not in said
    assert (folder / model / "log.jsonl").is_file() is (status == 0)


@pytest.mark.parametrize("absent", ["horovod", "torch"])
def test_without_horovod_or_pytorch(results: dict[str, Result], absent: str) -> None:
    for command, answer in zip(COMMANDS, answers_of(results[absent]), strict=True):
        assert answer.status in (1, 2), command
        lines = [line for line in answer.output.splitlines() if line.startswith("Error:")]
        assert len(lines) == 1 and "Traceback" not in answer.output, answer.output
        assert "hvd-ckpt build-horovod" in lines[0] or answer.status == 2, answer.output


def test_the_library_without_horovod(results: dict[str, Result]) -> None:
    lines = results["library"].stdout.splitlines()
    assert len(lines) == 3, results["library"].stderr
    for line in lines:
        assert line.startswith("Horovod is not installed") and "hvd-ckpt build-horovod" in line
