"""The example scripts run as they are written, with tiny settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, *arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_original_comparison_with_mixed_precision(tmp_path):
    result = run_example(
        "test_memory_optimized_horovod_apex_comparison.py",
        *("--quick", "--use_amp", "--chunks", "2", "--workloads", "bert", "--passes", "0"),
        *("--output", str(tmp_path / "report")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "hvd_ckpt is right in all 3 cells." in result.stdout
    page = (tmp_path / "report" / "report.md").read_text()
    assert "- precision: fp16" in page or "- precision: apex-O1" in page
    assert "apex is absent" in page or "| apex |" in page
