"""Tests of ``python -m benchmarks recompute`` on tiny models: all methods compute the same, and the figures are right."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks.__main__ import benchmarks as bench
from benchmarks.recompute.case import Case, RecomputeJob, merged, run_case
from benchmarks.recompute.measure import BITWISE, Bench, Entry, predicted_peak, twin
from benchmarks.recompute.report import method_table, plan_table, remarks
from hvd_ckpt.app.compare.runner.workloads import workload

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")

TORCH = ("sequential", "blocks", "selective")
MIB = 1 << 20


def installed(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name))


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_methods_compute_the_same(name: str, tmp_path: Path) -> None:
    families = (*TORCH, *installed("torch_remat"))
    case = run_case(RecomputeJob(tmp_path, 1, name, "quick", None, families, (), 1), CPU)
    assert {entry.family for entry in case.entries} == {"keep", *families}
    assert {entry.name: entry.failure or entry.same for entry in case.entries} == {
        entry.name: BITWISE for entry in case.entries
    }
    assert all(len(entry.seconds) == 1 for entry in case.entries)
    peaks = {entry.name: entry.peak_bytes or 0 for entry in case.entries}
    assert (
        peaks["checkpoint every block"] < peaks["checkpoint every second block"] < peaks["no recomputation"]
    )


def test_a_densenet_is_checkpointed_in_its_layers_and_batch_norms_that_run_twice_are_found(
    tmp_path: Path,
) -> None:
    case = run_case(RecomputeJob(tmp_path, 1, "densenet", "quick", None, ("blocks", "layers"), (), 1), CPU)
    assert {entry.name: entry.failure or entry.same for entry in case.entries} == {
        "no recomputation": BITWISE,
        "checkpoint every block": "running statistics",
        "checkpoint every second block": "running statistics",
        "checkpoint in each layer, reentrant": "running statistics",
        "checkpoint in each layer": "running statistics",
        "efficient DenseNet of hvd_ckpt": BITWISE,
    }
    assert all((entry.peak_bytes or 0) < (case.keep.peak_bytes or 0) for entry in case.entries[1:])
    assert case.sound, "a fault of a method is none of this library"


class Lost(torch.autograd.Function):
    """The identity, whose gradient is nan."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan


@pytest.mark.parametrize("gradient", ["half", "nan"])
def test_a_wrong_result_is_told_and_does_not_count(gradient: str) -> None:
    measured = Bench(workload("gpt", "quick"), CPU)
    entry = Entry("wrong", "blocks")

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = measured.model(inputs)
        return 0.5 * output if gradient == "half" else Lost.apply(output)  # type: ignore[no-untyped-call]

    measured.measure(entry, lambda: forward)
    assert entry.runs and not entry.right
    assert entry.same.startswith("loss by" if gradient == "half" else "gradients by nan")


def test_a_method_that_fails_is_an_entry_with_a_reason() -> None:
    measured = Bench(workload("gpt", "quick"), CPU)

    def refuse() -> nn.Module:
        raise RuntimeError("no\nnot today")

    def missing() -> nn.Module:
        import no_such_peer  # type: ignore[import-not-found]  # noqa: F401

        raise AssertionError

    first, second = Entry("one", "blocks"), Entry("two", "torch_remat")
    measured.measure(first, refuse)
    measured.measure(second, missing)
    assert first.failure == "RuntimeError: no"
    assert second.failure == "no_such_peer is not installed"
    assert not first.runs


def test_a_twin_shares_parameters_and_buffers_but_no_modules() -> None:
    model = workload("densenet", "quick").model()
    other = twin(model)
    assert all(one is two for one, two in zip(model.parameters(), other.parameters()))
    assert all(one is two for one, two in zip(model.buffers(), other.buffers()))
    assert not set(map(id, model.modules())) & set(map(id, other.modules()))


def test_a_large_peak_is_predicted_from_small_batches() -> None:
    large = dataclasses.replace(workload("densenet", "quick"), batch=16)
    measured = Bench(large, CPU)
    assert predicted_peak(large) == pytest.approx(measured.examine(measured.model)[0], rel=0.05)


def ran(name: str, family: str, mib: int, seconds: list[float]) -> Entry:
    return Entry(name, family, peak_bytes=mib * MIB, same=BITWISE, right=True, seconds=seconds)


def test_plan_is_listed_beside_its_method() -> None:
    keep = ran("keep", "keep", 100, [1.0, 10.0])  # the machine is ten times as slow in the second round
    every = ran("every", "blocks", 50, [2.0, 20.0])
    broken = Entry("broken", "torch_remat", failure="it broke")
    good, high = ran("plan a", "ours", 40, [1.8, 18.0]), ran("plan b", "ours", 71, [1.0, 10.0])
    good.predicted_bytes, good.predicted_seconds = 50 * MIB, 9.9
    answers = {"0.5x": "plan a", "every": "plan a"}
    case = Case("", "gpt", entries=[keep, every, broken], plans=[good, high], answers=answers)
    smallest = case.smallest()
    assert smallest is not None and smallest[2] == 0.8
    rows = {row[0]: row[1:] for row in method_table(case).rows}
    assert rows["every"] == ("50.0", "0.50", "2.00 [2.00, 2.00]", BITWISE, "40.0", "0.90 [0.90, 0.90]")
    assert rows["torch_remat"][3] == "does not run"
    assert any("it broke" in line for line in remarks(case))
    assert plan_table(case).rows[0][4:] == (BITWISE, "0.800", "1.00", "2")
    assert case.sound
    high.failure = "RuntimeError: it broke"
    assert not case.sound
    high.failure = "BudgetError: the smallest is 3 MiB"
    assert case.sound, "a budget that cannot be met is an answer"


def test_ranks_are_merged_to_the_largest_peak_and_any_difference() -> None:
    def case(mib: int, seconds: list[float], same: str = BITWISE) -> Case:
        entry = ran("plan", "ours", mib, seconds)
        entry.same, entry.right = same, same == BITWISE
        return Case("", "gpt", ranks=2, entries=[ran("keep", "keep", 9, [1.0])], plans=[entry])

    found = merged([case(3, [1.0]), case(4, [2.0], "gradients by 1e-01")])
    (plan,) = found.plans
    assert (plan.peak_bytes, plan.seconds, plan.same) == (4 * MIB, [1.0], "gradients by 1e-01")
    assert not found.sound
    assert Case("", "gpt", left_out="no room").sound and not Case("", "gpt", failure="no end").sound


def test_command_writes_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    arguments = ["recompute", "--quick", "--workloads", "lstm", "--methods", "blocks", "--rounds", "2"]
    result = CliRunner().invoke(bench, [*arguments, "--output", str(folder)])
    assert result.exit_code == 0, result.output
    assert "checkpoint every block" in result.output
    (found,) = json.loads((folder / "results.json").read_text())["results"]
    assert [len(one["seconds"]) for one in found["entries"]] == [2, 2, 2]
    assert "| checkpoint every block |" in (folder / "report.md").read_text()
    if installed("matplotlib"):
        assert (folder / "recompute.png").stat().st_size > 10_000
