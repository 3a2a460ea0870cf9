"""Optional packages and Horovod itself, missing: one line that says how to get each, and all that does not need it works."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvd_ckpt.install import extras

pytestmark = pytest.mark.launch

OPTIONAL = (
    "matplotlib",
    "mpi4py",
    "PIL",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "transformers",
)
COMMANDS = ("bench", "compare", "consolidate", "plan", "plot", "train")
DRIVER = """
import json, sys
absent, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(absent))
import importlib.metadata
from click.testing import CliRunner
from hvd_ckpt.cli.main import main
from hvd_ckpt.install import extras
extras.importlib.metadata.requires = lambda name: {requires!r}
extras.pip_command = lambda extra: f"pip install 'here[{{extra}}]'"
answers = []
for command in commands:
    result = CliRunner().invoke(main, command)
    answers.append((result.exit_code, result.output))
print(json.dumps(answers))
"""


class Answer(NamedTuple):
    status: int
    output: str


def call(absent: tuple[str, ...], *commands: list[str], folder: Path) -> list[Answer]:
    """What commands answer in a process that cannot import the packages in ``absent``."""
    driver = DRIVER.format(requires=declared())
    result = subprocess.run(
        [sys.executable, "-c", driver, json.dumps([absent, commands])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
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


def test_without_optional_packages(tmp_path: Path) -> None:
    bench, plan, compare, plot = call(
        OPTIONAL,
        ["bench", "--help"],
        ["plan", "--model", "bert-tiny", "--budget", "0.5x"],
        ["compare", "--quick"],
        ["plot", "run"],
        folder=tmp_path,
    )
    assert bench.status == 0 and "Usage:" in bench.output
    for answer, package in ((plan, "transformers"), (compare, "sklearn")):
        assert answer.status == 2, answer.output
        (line,) = [line for line in answer.output.splitlines() if line.startswith("Error:")]
        assert f"{package} is not installed: pip install 'here[training]'" in line
    assert plot.status == 2


@pytest.mark.parametrize(
    ("model", "status", "package"), [("bert-tiny", 2, "transformers"), ("gpt-tiny", 0, "matplotlib")]
)
def test_training_without_optional_packages(tmp_path: Path, model: str, status: int, package: str) -> None:
    """A run that needs one ends with one line; one that only lacks a picture says so and goes on."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 400)
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        "from hvd_ckpt.cli.main import main; main(sys.argv[1:])"
    )
    options = [
        "--text",
        "text.txt",
        "--steps",
        "1",
        "--batch",
        "2",
        "--sequence-length",
        "16",
        "--output",
        "run",
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, "train", "--model", model, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == status, said
    assert f"{package} is not installed" in said and "Traceback" not in said
    assert (tmp_path / "run" / "log.jsonl").is_file() is (status == 0)


@pytest.mark.parametrize("absent", ["horovod", "torch"])
def test_without_horovod_or_pytorch(tmp_path: Path, absent: str) -> None:
    for command, answer in zip(
        COMMANDS, call((absent,), *([name, "x"] for name in COMMANDS), folder=tmp_path)
    ):
        assert answer.status in (1, 2), command
        lines = [line for line in answer.output.splitlines() if line.startswith("Error:")]
        assert len(lines) == 1 and "Traceback" not in answer.output, answer.output
        assert "hvd-ckpt build-horovod" in lines[0] or answer.status == 2, answer.output


def test_the_library_without_horovod() -> None:
    code = (
        "import sys; sys.modules['horovod'] = None\nimport hvd_ckpt\n"
        "for name in ('init', 'DistributedOptimizer', 'allreduce'):\n"
        "    try: getattr(hvd_ckpt, name)\n    except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert all(
        line.startswith("Horovod is not installed") and "hvd-ckpt build-horovod" in line for line in lines
    )


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git"}},
            "pip install 'hvd_ckpt[mpi] @ git+https://host/x.git'",
        ),
        ({"url": "file://{folder}/a%20clone", "dir_info": {}}, "pip install '{folder}/a clone[mpi]'"),
    ],
)
def test_the_command_names_where_the_package_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], command: str
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "setup.cfg").touch()

    class Distribution:
        def read_text(self, name: str) -> str:
            return json.dumps(record).replace("{folder}", str(tmp_path))

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert extras.pip_command("mpi") == command.replace("{folder}", str(tmp_path))
