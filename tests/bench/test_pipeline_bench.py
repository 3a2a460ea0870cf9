"""``hvd-ckpt bench pipeline`` and ``hvd-ckpt compare --stages`` in short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.compare import stages
from hvd_ckpt.bench.compare.command import compare

pytestmark = pytest.mark.launch


def run(command: click.Command, folder: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*arguments, "--output", str(folder / "report")])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((folder / "report" / "results.json").read_text())
    return found


def test_engines_take_the_same_steps(tmp_path: Path) -> None:
    found = run(
        bench, tmp_path, "pipeline", "--quick", "--workloads", "gpt", "--schedules", "1f1b,interleaved", "--engines", "gloo,torch"
    )["results"][1:]  # fmt: skip
    assert [(one["schedule"], one["engine"]) for one in found] == [
        (schedule, engine)
        for schedule in ("1f1b", "interleaved")
        for engine in ("hvd_ckpt, Gloo", "torch, Gloo")
    ]
    for one in found:
        assert one["jobs"] and one["of_ideal"] and 0 < one["peak_bytes"] < one["unstaged_peak_bytes"]
    sent = [one["sent_bytes"] for one in found]
    for ours, theirs in zip(sent[::2], sent[1::2]):
        assert 0 < theirs <= ours < 2 * theirs  # lengths of headers, random states and the loss
    for rank in found[0]["timelines"]:
        kinds = [span["kind"] for span in rank]
        assert kinds.count("forward") == kinds.count("backward") == 8
        assert {"wait", "recompute"} <= set(kinds)
    assert list((tmp_path / "report").glob("timeline-*.png"))


def test_stages_are_right_where_micro_batches_have_unevenly_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SCHEDULES", ("1f1b",))
    found = run(compare, tmp_path, "--stages", "2", "--scenarios", "weighted")["results"]
    assert {one["engine"]: one["status"] for one in found} == {
        "hvd_ckpt, 1f1b": "right",
        "torch, 1f1b": "wrong",
    }
