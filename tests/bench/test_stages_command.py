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
    report = json.loads((output / "results.json").read_text())
    found = {line["configuration"]: line for line in report["results"]}
    assert set(found) == {
        *("hvd_ckpt-3", "hvd_ckpt-3-recompute", "hvd_ckpt-3-offload", "hvd_ckpt-3-offload-recompute"),
        *("fsdp2-3", "fsdp2-3-recompute"),
    }
    ours = found["hvd_ckpt-3"]["ranks"][0]
    assert ours["counted"] == found["hvd_ckpt-3-recompute"]["ranks"][0]["counted"] > 0, (
        "recomputation adds no message"
    )
    assert all(line["loss_difference"] < 1e-4 for line in found.values())
    assert all(len(rank["seconds"]) == 1 for line in found.values() for rank in line["ranks"])
    # Adam in float32 needs 16 bytes for each parameter, of which each of two ranks holds half.
    elements = int(report["model"].split()[0])
    assert 8 <= (ours["parameters"] + ours["gradients"] + ours["state"]) / elements < 1.05 * 8
    assert all(rank["peak"] > rank["parameters"] for line in found.values() for rank in line["ranks"])
    offloaded = found["hvd_ckpt-3-offload"]["ranks"][0]
    assert offloaded["state"] == 0 and offloaded["on_disk"] == ours["state"]
    assert chart.stat().st_size > 0
    for words in (process.stdout, (output / "report.md").read_text()):
        assert "bytes per parameter" in words
    assert report["ranks"] == "2 over gloo"


def test_every_wire_format_trains(tmp_path: Path) -> None:
    output, text = tmp_path / "out", tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = [
        sys.executable,
        "-m",
        "hvd_ckpt.cli.main",
        "bench",
        "shard",
        "--wire",
        "--quick",
        "--steps",
        "2",
    ]
    process = subprocess.run(
        [*command, "--text", str(text), "--output", str(output)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    runs = json.loads((output / "results.json").read_text())["results"]
    assert [(run["stage"], run["format"]) for run in runs] == [
        (stage, name) for stage in (2, 3) for name in ("fp32", "fp16", "bf16", "int8")
    ]
    assert all(run["sent"] > 0 and None not in run["losses"] for run in runs)
