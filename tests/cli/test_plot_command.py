"""Tests of ``hvd-ckpt plot``: runs given by folder, log and name, and one line for each invalid run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hvd_ckpt.app.cli.main import main
from hvd_ckpt.app.training import logs
from hvd_ckpt.app.training.logs import Logs

STEPS = (1, 2, 3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plot", *map(str, arguments)])


def write_run(folder: Path, first: float) -> Path:
    log = Logs(folder)
    for step in STEPS:
        log.write({"step": step, "kind": "train", "loss": first / step})
    log.close()
    return folder


def test_runs_are_drawn_by_folder_log_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: dict[str, list[float]] = {}
    draw = logs._draw_run

    def record(axes: Any, number: int, name: str, log: Path, alone: bool) -> None:
        draw(axes, number, name, log, alone)
        lines[name] = list(axes.get_lines()[-1].get_ydata())

    monkeypatch.setattr(logs, "_draw_run", record)
    one, two = write_run(tmp_path / "one", 6.0), write_run(tmp_path / "two", 12.0)
    equal = write_run(tmp_path / "lr=0.1", 18.0)
    picture = tmp_path / "new" / "both.png"
    result = run(one, f"half={two}", two / "log.jsonl", equal, "--output", picture)
    assert result.exit_code == 0, result.output
    first = {"one": 6.0, "half": 12.0, "two": 12.0, "lr=0.1": 18.0}
    assert lines == {name: [loss / step for step in STEPS] for name, loss in first.items()}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_undrawable_runs_are_one_line(tmp_path: Path) -> None:
    good, empty, damaged = write_run(tmp_path / "good", 1.0), tmp_path / "empty", tmp_path / "damaged"
    twin = write_run(tmp_path / "other" / "good", 1.0)
    empty.mkdir()
    damaged.mkdir()
    (damaged / "log.jsonl").write_text('{"step": 1, "kind": "train", "loss": 2.0}\nnonsense\n')
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\n")
    cases = {
        (): "Missing argument",
        (f"a={tmp_path / 'absent'}",): f"there is no run '{tmp_path / 'absent'}'",
        (f"={good}",): "give NAME=RUN, with both",
        (empty,): f"run '{empty}' has no log.jsonl",
        (good, damaged): f"log '{damaged / 'log.jsonl'}', line 2: not a record",
        (binary,): f"log '{binary}', line 1: not a record",
        (good, twin): "two runs are named 'good'",
        (good, "--output", tmp_path / "loss.jpg"): "give a name that ends in .png",
        (good, "--output", binary / "loss.png"): "--output: cannot write",
    }
    for arguments, words in cases.items():
        output = () if "--output" in arguments else ("--output", tmp_path / "loss.png")
        result = run(*arguments, *output)
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert words in result.output
        assert result.output.count("\n") == 1
    assert not (tmp_path / "loss.png").exists()
