"""The README's training script runs as it is written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_ckpt.probe import find_launcher

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]


def test_the_training_script(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## Training script", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found.group(1))
    launcher = find_launcher()
    assert launcher is not None
    result = subprocess.run(
        [*launcher, "-np", "2", sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 5 and max(losses) < 1.0  # ten classes: 2.3 before training
