"""Benchmark commands in short, as whole commands that start jobs; the others run their job in the ranks of ``test_commands.py``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks as bench
from hvd_ckpt.app.compare.command import compare

pytestmark = pytest.mark.launch
with_torch_1f1b = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="PyTorch 2.6's own 1F1B does not end over Gloo"
)

Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command, which must succeed; returns its output and ``results.json``. The report is in ``tmp_path / "report"``."""

    def run(command: click.Command, *arguments: str) -> tuple[str, dict[str, Any]]:
        result = CliRunner().invoke(command, [*arguments, "--output", str(tmp_path / "report")])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code == 0, result.output
        return result.output, json.loads((tmp_path / "report" / "results.json").read_text())

    return run


def test_methods_of_local_sgd_send_what_they_say(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    tools = [os.geteuid() == 0, *map(shutil.which, ("unshare", "ip", "tc"))]
    links = ["none", "100"] if all(tools) else ["none"]
    options = ("--quick", "--engines", "hvd_ckpt,int8-50,averager", "--set", f"text={text}")
    rows = run(bench, "local", *options, "--link", ",".join(links))[1]["results"]
    assert [row["link"] for row in rows[::3]] == links and all(row["rounds"] for row in rows)
    synchronous, ours, torch = rows[:3]
    assert 3.6 < torch["sent"] / ours["sent"] < 4  # a byte for each value, and scales
    assert synchronous["sent"] / torch["sent"] == pytest.approx(50)
    for row in (synchronous, ours, torch):
        assert len(row["rounds"]) == 1 and 0 < row["loss"] < 7


def test_replicas_have_one_hash_on_any_number_of_ranks(run: Run) -> None:
    """On 1 and 4 ranks, and resumed; over MPI: tests/reduction/test_replicas_launch.py."""
    _, report = run(bench, "replicas", "--quick", "--np", "1,4", "--controllers", "gloo", "--curves", "2")
    *_, ours = report["losses"].values()
    assert len(report["losses"]) == 2 and ours["1"] == ours["4"] and len(ours["1"]) == 2
    found = report["results"]
    assert all(one["one"] and len(one["hashes"]) >= 3 for one in found)
    assert len({one["hashes"][0] for one in found}) == len(found) == 2
    assert found[0]["skipped_steps"][0] > 0  # where the loss scale found an overflow


@with_torch_1f1b
def test_engines_of_pipeline_take_the_same_steps(run: Run, tmp_path: Path) -> None:
    options = ("--workloads", "gpt", "--schedule", "1f1b,interleaved", "--recompute", "never,always")
    whole, *rows = run(bench, "pipeline", "--quick", *options)[1]["results"]
    assert [(row["schedule"], row["recompute"], row["engine"]) for row in rows] == [
        (schedule, *what)
        for schedule in ("1f1b", "interleaved")
        for what in (("never", "stages"), ("never", "torch-stages"), ("always", "stages"))
    ]
    for row in rows:
        assert row["rounds"] and row["of_ideal"] and 0 < row["peak_bytes"] < whole["peak_bytes"]
    for ours, theirs, recomputed in zip(rows[::3], rows[1::3], rows[2::3]):
        # Lengths of headers, random states and the loss.
        assert 0 < theirs["sent"] <= ours["sent"] < 2 * theirs["sent"]
        assert recomputed["peak_bytes"] < ours["peak_bytes"]
    assert (tmp_path / "report" / "picture.png").exists()


@with_torch_1f1b
def test_stages_are_right_where_micro_batches_have_unevenly_many_tokens(run: Run) -> None:
    found = run(compare, "--stages", "2", "--scenarios", "weighted", "--variants", "1f1b")[1]["results"]
    assert [one["status"] for one in found] == ["right", "wrong"]


def test_steps_in_parts_are_timed_beside_pytorch(run: Run) -> None:
    ours, theirs = run(bench, "tensor", "--quick", "--rounds", "2")[1]["results"]
    assert (ours["engine"], theirs["engine"]) == ("parts", "torch-parts")
    assert len(ours["rounds"]) == 2 and ours["of_torch-parts"] and ours["peak_bytes"]


def test_parts_of_layers_are_right(run: Run) -> None:
    found = run(compare, "--tensor", "2", "--scenarios", "tied,dropout")[1]["results"]
    ours = [one for one in found if one["engine"].endswith("HvdCkptParts")]
    assert len(ours) == 6 and {one["status"] for one in ours} == {"right"}
