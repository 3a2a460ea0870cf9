"""Tests of missing optional packages and Horovod: one line with the way to install each, and everything else works."""

import configparser
import json
from pathlib import Path

import pytest
from forked import Case, run_forked

pytestmark = pytest.mark.launch

OPTIONAL = ("matplotlib", "mpi4py", "PIL", "sklearn", "tensorboard", "tokenizers", "transformers")
COMMANDS = [[name, "x"] for name in ("compare", "export", "plan", "train")]
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


def declared():
    """What setup.cfg declares, as the metadata of an installed package has it."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    return [
        f'{line.split(";")[0].strip()}; extra == "{extra}"'
        for extra, lines in config["options.extras_require"].items()
        for line in lines.splitlines()
        if line.strip()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("extras")


@pytest.fixture(scope="module")
def results(folder):
    """Commands in processes that cannot import some packages."""

    def call(absent, *commands):
        return Case(CALL.format(absent=absent, requires=declared(), commands=commands))

    def train(model):
        options = f"train --model {model} --data text:text.txt --steps 1 --batch 2 --sequence-length 16 --output {model}"
        return Case(TRAIN.format(folder=str(folder), absent=OPTIONAL), arguments=tuple(options.split()))

    (folder / "text.txt").write_text("the cat sat on the mat\n" * 400)
    planned = ["plan", "--model", "bert-tiny", "--budget", "0.5x"]
    cases = {
        "horovod": call(("horovod",), *COMMANDS),
        "torch": call(("torch",), *COMMANDS),
        "library": Case(LIBRARY),
        "optional": call(OPTIONAL, planned, ["compare", "--quick"]),
        "bert-tiny": train("bert-tiny"),
        "gpt-tiny": train("gpt-tiny"),
    }
    return run_forked(IMPORTS, cases)


def errors_of(result):
    """For each command its status and its error, which is one line."""
    assert result.returncode == 0, result.stderr
    for status, output in json.loads(result.stdout.splitlines()[-1]):
        (line,) = [line for line in output.splitlines() if line.startswith("Error:")]
        assert "Traceback" not in output, output
        yield status, line


def test_without_optional_packages(results, folder):
    for (status, line), package in zip(
        errors_of(results["optional"]), ("transformers", "sklearn"), strict=True
    ):
        assert status == 2 and f"{package} is not installed: pip install 'here[training]'" in line
    for model, status, says in (("bert-tiny", 2, "transformers is not installed"), ("gpt-tiny", 0, "")):
        said = results[model].stdout + results[model].stderr
        assert results[model].returncode == status and says in said and "Traceback" not in said, said
        assert (folder / model / "log.jsonl").is_file() is (status == 0)
    assert "not installed" not in said


@pytest.mark.parametrize("absent", ["horovod", "torch"])
def test_without_horovod_or_pytorch(results, absent):
    errors = list(errors_of(results[absent]))
    assert len(errors) == len(COMMANDS)
    for status, line in errors:
        assert status == 2 or (status == 1 and "hvd-ckpt build-horovod" in line)


def test_the_library_without_horovod(results):
    lines = results["library"].stdout.splitlines()
    assert len(lines) == 3, results["library"].stderr
    for line in lines:
        assert line.startswith("Horovod is not installed") and "hvd-ckpt build-horovod" in line
