"""Tests of the hvd-ckpt command: it starts fast, lists its commands, and explains commands that cannot be loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from hvd_ckpt.app.cli import main as cli
from hvd_ckpt.app.cli.command_line import progress_bar
from hvd_ckpt.app.cli.tables import Table

pytestmark = pytest.mark.launch


def test_help_and_bad_flags_import_neither_torch_nor_horovod() -> None:
    code = """
import click, sys
from benchmarks.__main__ import benchmarks
from hvd_ckpt.app.cli.main import COMMANDS, main

SUITES = ("pipeline", "recompute", "reduce", "shard", "train")
for group, words in ((main, []), *((main, [name]) for name in COMMANDS), *((benchmarks, [name]) for name in SUITES)):
    try:
        group([*words, "--help"], standalone_mode=False)
        group([*words, "--no-such-flag"], standalone_mode=False)
    except click.ClickException as error:
        print(error.exit_code, error.format_message())
    heavy = [name for name in ("torch", "horovod", "transformers", "mpi4py.MPI") if name in sys.modules]
    if heavy:
        sys.exit(f"{words} imported {heavy}")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("No such option '--no-such-flag'", "Usage:"):
        assert result.stdout.count(text) == 1 + len(cli.COMMANDS) + 5
    assert all(name in result.stdout for name in cli.COMMANDS)


def test_without_a_terminal_long_work_prints_lines_all_the_same(monkeypatch, capsys) -> None:
    monkeypatch.setattr("hvd_ckpt.utils.text.SECONDS", 0.01)
    with progress_bar() as progress:
        task = progress.add_task("np=2, batch 16", total=3)
        progress.advance(task)
        told = ""
        while told.count("\n") < 2:
            time.sleep(0.01)
            told += capsys.readouterr().err
    assert all(re.fullmatch(r"np=2, batch 16  1/3  0:00:\d\d", line) for line in told.splitlines())


def test_a_number_that_a_narrow_terminal_cuts_ends_in_an_ellipsis(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(("policy", "MiB", "step ms"), [("kept", "123456.7", "9876543.2")], words=("policy",))
    Console(width=80).print(table.for_terminal())
    assert re.search(r"kept +123456\.7 +9876543\.2", capsys.readouterr().out)
    Console(width=20).print(table.for_terminal())
    assert re.search(r"12345\d*… +987654\d*…", capsys.readouterr().out)


def test_commands_that_are_unknown_cannot_be_loaded_or_are_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(name: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.main, [name])
        return result.exit_code, result.output.strip()

    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt("interrupted while planning")

    status, said = run("divine")
    assert status == 2 and "'divine'" in said
    monkeypatch.setitem(cli.COMMANDS, "absent", ("no_such_module", "Not there."))
    status, said = run("absent")
    assert status == 1 and "absent cannot be loaded" in said and "hvd-ckpt doctor" in said
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: interrupted)
    assert run("plan") == (130, "interrupted while planning")


def test_ranks_of_torchrun_count_before_horovod_starts(monkeypatch, tmp_path: Path) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
    monkeypatch.setattr(os, "environ", {**os.environ, **started})
    (tmp_path / "run.yaml").write_text("model: gpt-tiny\npipeline: 3\n")
    result = CliRunner().invoke(cli.main, ["layout", str(tmp_path / "run.yaml"), "--memory", "1GiB"])
    assert "2 ranks cannot be divided into pipeline 3" in result.output
