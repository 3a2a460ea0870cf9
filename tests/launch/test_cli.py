"""The hvd-ckpt command itself: it starts fast, lists what exists, and says what to do where a command cannot be loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvd_ckpt import cli


def test_help_imports_neither_torch_nor_horovod() -> None:
    code = (
        "import sys\nfrom hvd_ckpt.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'horovod', 'transformers', 'mpi4py.MPI') if name in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    for name in cli.COMMANDS:
        assert name in result.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_that_is_listed_exists(name: str) -> None:
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_an_unknown_command_is_named() -> None:
    result = CliRunner().invoke(cli.main, ["divine"])
    assert result.exit_code == 2
    assert "'divine'" in result.output


def test_a_command_that_cannot_be_loaded_sends_to_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "absent", cli._Entry("hvd_ckpt.no_such_module", "absent", "Not there."))
    result = CliRunner().invoke(cli.main, ["absent"])
    assert result.exit_code == 1
    assert "absent cannot be loaded" in result.output
    assert "hvd-ckpt doctor" in result.output
