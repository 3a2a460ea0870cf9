"""Test of the training script in the README."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import hvd_ckpt as hc

pytestmark = pytest.mark.ranks(gloo=(2,))

ROOT = Path(__file__).resolve().parents[2]


def test_the_training_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text().split("## Training script", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found.group(1))
    runpy.run_path(str(script), run_name="__main__")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    if hc.rank() == 0:
        assert len(losses) == 5 and max(losses) < 1.0  # ten classes: 2.3 before training
    else:
        assert losses == []
