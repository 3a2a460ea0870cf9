"""The scripts of the page about a loop of one's own: one stops, resumes and ends in the bits of a run that was never stopped, and
one fits a memory."""

from __future__ import annotations

import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_script_resumes_in_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "train.py"
    if hc.rank() == 0:
        script.write_text(BLOCKS[0], encoding="utf-8")
        (folder / "stopped").mkdir()
        (folder / "whole").mkdir()
    hc.barrier()

    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    statuses: list[int] = []
    monkeypatch.setattr(sys, "exit", statuses.append)

    def run(name: str, **names: Any) -> dict[str, Any]:
        monkeypatch.chdir(folder / name)
        variables = runpy.run_path(str(script), init_globals=names, run_name="__main__")
        hc.barrier()
        return variables

    whole = run("whole")
    stopped = run("stopped", print=stop)  # rank 0 prints at step 20
    resumed = run("stopped")
    assert statuses == [0, 128 + signal.SIGTERM, 0]
    assert stopped["stop"] == "SIGTERM" and 20 <= stopped["step"] < whole["step"] == resumed["step"]
    assert any((folder / "stopped" / "plans").iterdir())
    for name, parameter in whole["model"].state_dict().items():
        assert torch.equal(parameter, resumed["model"].state_dict()[name]), name


def test_the_settings_for_a_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / f"train{hc.rank()}.py"
    before, after = re.split(r"# 3\..*?(?=# 5\.)", BLOCKS[0], flags=re.DOTALL)
    script.write_text(before + BLOCKS[1] + after, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "exit", lambda status: None)
    found = runpy.run_path(str(script), run_name="__main__")
    assert (found["shard"], found["step"]) == ("optimizer", 84)
    assert 0 < found["plan"].measured.peak_bytes <= found["rest"] < found["memory"]
