"""Some hostile inputs of all kinds, in a process that watches itself and whose memory is limited; ``run.py`` feeds thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_hostile_inputs_end_in_one_line_and_change_nothing() -> None:
    command = [sys.executable, Path(__file__).with_name("run.py"), "--inputs", "200", "--seed", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith("0 findings")
