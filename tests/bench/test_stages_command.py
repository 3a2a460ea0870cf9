"""``hvd-ckpt bench shard`` as its user runs it, in short: stages beside a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch


def test_stages_are_measured_beside_a_peer_that_trains_the_same(tmp_path: Path) -> None:
    output, text, chart = tmp_path / "out", tmp_path / "text", tmp_path / "chart.png"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    process = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "hvd_ckpt.cli.main",
                "bench",
                "shard",
                "--quick",
                "--np",
                "2",
                "--stages",
                "3",
            ),
            *(
                "--rounds",
                "1",
                "--peers",
                "fsdp2",
                "--text",
                str(text),
                "--chart",
                str(chart),
                "--output",
                str(output),
            ),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    about, *lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    found = {line["contender"]: line for line in lines}
    assert set(found) == {
        *("hvd_ckpt-3", "hvd_ckpt-3-recompute", "hvd_ckpt-3-offload", "hvd_ckpt-3-offload-recompute"),
        *("fsdp2-3", "fsdp2-3-recompute"),
    }
    ours, theirs = found["hvd_ckpt-3"], found["fsdp2-3"]
    counted = [found[name]["ranks"][0]["counted"] for name in ("hvd_ckpt-3", "hvd_ckpt-3-recompute")]
    assert counted[0] == counted[1] > 0
    assert all(line["loss_difference"] < 1e-4 for line in lines)
    assert all(len(rank["seconds"]) == 1 for line in lines for rank in line["ranks"])
    assert 1 <= ours["states_of_theory"] < 1.05
    # Gloo reduce-scatters by reducing everything: the peer sends more than it asks for.
    assert theirs["ranks"][0]["sent"] > 1.2 * theirs["ranks"][0]["counted"]
    offloaded = found["hvd_ckpt-3-offload"]["ranks"][0]
    assert offloaded["state"] == 0 and offloaded["on_disk"] == ours["ranks"][0]["state"]
    assert chart.stat().st_size > 0
    for words in (process.stdout, (output / "shard.md").read_text()):
        assert "with recomputation and" in words and "bytes per parameter" in words
    assert about["ranks"] == "2 over gloo"
