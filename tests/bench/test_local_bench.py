"""``hvd-ckpt bench local`` in short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.local.command import can_throttle

pytestmark = pytest.mark.launch


def test_methods_send_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 60)
    words = ["local", "--quick", "--methods", "int8-50,torch-50", "--steps", "50", "--link-steps", "4"]
    words += ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "report")]
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "report" / "results.json").read_text())["results"]
    sent = {one["method"]: one["sent"] for one in found}
    assert 3.6 < sent["torch-50"] / sent["int8-50"] < 4  # a byte for each value, and scales
    for one in found:
        assert len(one["curves"][0]) == len(one["points"]) == 3 and one["rates"][0] > 0
        assert (one["on_link"] is not None) == can_throttle()
    assert (tmp_path / "report" / "losses-np2.png").exists()
