"""A few hundred hostile inputs of all kinds; ``run.py`` feeds ten thousand and more.

They are fed in a process of their own, which watches itself and whose memory is limited.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).with_name("run.py")


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RUN, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_hostile_inputs_end_in_one_line_and_change_nothing() -> None:
    done = fuzz("--inputs", "300", "--seed", "20")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith("0 findings")
