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


def test_the_chosen_layout_is_beside_all_others(run: Run) -> None:
    (row,) = run(bench, "layouts", "--quick")[1]["results"]
    figures = {name: values[0] for name, values in row["figures"].items()}
    assert figures["of_best"] >= 1 and 0 < figures["of_memory"] <= 1
    assert len(figures["rows"]) > figures["layouts"] > 0
    tried = [layout for layout, *_, trial in figures["rows"][: figures["layouts"]] if trial is not None]
    assert figures["chosen"] in tried


def test_layouts_of_clusters_are_predicted(run: Run) -> None:
    slow, fast = run(bench, "clusters", "--quick")[1]["results"]
    assert (slow["link"], fast["link"]) == ("25", "400")
    assert 0 < slow["efficiency"] <= fast["efficiency"] <= 1
    assert slow["alone_efficiency"] <= slow["efficiency"]


def test_replicas_have_the_same_losses_on_any_number_of_ranks(run: Run) -> None:
    rows = run(bench, "replicas", "--quick", "--np", "4,1")[1]["results"]
    losses = {(row["engine"], row["np"]): row["figures"]["losses"][0] for row in rows}
    assert losses["replicas", 4] == losses["replicas", 1] and len(losses["horovod", 4]) == 4
    assert [row["same_losses"] for row in rows if row["engine"] == "replicas"] == ["yes", "yes"]


@with_torch_1f1b
def test_engines_of_pipeline_take_the_same_steps(run: Run, tmp_path: Path) -> None:
    options = ("--workloads", "gpt", "--schedule", "1f1b", "--recompute", "never,always")
    whole, *rows = run(bench, "pipeline", "--quick", *options)[1]["results"]
    engines = [("never", "stages"), ("never", "torch-stages"), ("always", "stages")]
    assert [(row["recompute"], row["engine"]) for row in rows] == engines
    for row in rows:
        assert row["rounds"] and row["of_ideal"] and 0 < row["peak_bytes"] < whole["peak_bytes"]
    ours, theirs, recomputed = rows
    # Lengths of headers, random states and the loss.
    assert 0 < theirs["sent"] <= ours["sent"] < 2 * theirs["sent"]
    assert recomputed["peak_bytes"] < ours["peak_bytes"]
    assert (tmp_path / "report" / "picture.png").exists()


def test_steps_in_parts_are_timed_beside_pytorch(run: Run) -> None:
    ours, theirs = run(bench, "tensor", "--quick", "--rounds", "2")[1]["results"]
    assert (ours["engine"], theirs["engine"]) == ("parts", "torch-parts")
    assert len(ours["rounds"]) == 2 and ours["of_torch-parts"] and ours["peak_bytes"]
