"""``hvd-ckpt bench densenet`` with a tiny DenseNet: what it reports, who trains right, and what it makes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.densenet.case import Case
from hvd_ckpt.bench.densenet.contenders import step_peak
from hvd_ckpt.bench.densenet.job import Answer, Entry, Job
from hvd_ckpt.bench.densenet.report import Report
from hvd_ckpt.bench.densenet.steps import random_batch
from hvd_ckpt.bench.densenet.worker import too_large
from hvd_ckpt.models.densenet import densenet

MIB = 1 << 20
TINY = ("--depth", "22", "--pixels", "8", "--batches", "4", "--budget", "0.57x", "--rounds", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["densenet", *arguments])


def test_everyone_is_measured_and_this_library_trains_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny operators on two threads mostly wait for each other
    result = run(*TINY, "--ranks", "2", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "results.json").read_text())
    (case,) = report["results"]
    assert (case["ranks"], case["batch"], case["failed"]) == (2, 4, False)
    found = {one["name"].partition(" chunks")[0]: one for one in case["contenders"]}
    wrong = {name: one["differences"] for name, one in found.items() if one["differences"]}
    chunks = next(name for name in found if name.startswith("checkpoint_sequential"))
    assert list(found) == [
        "naive",
        "checkpoint in each layer, reentrant",
        "checkpoint in each layer",
        chunks,
        "efficient DenseNet",
        "plan 0.57x",
    ]
    each = [name for name in found if found[name]["family"] == "official"]
    assert wrong == {name: ["batch norm statistics"] for name in each}, (
        "they count each batch twice, and nothing else"
    )
    assert all(len(one["seconds"]) == 1 for one in found.values())
    assert all(
        one["peak_bytes"] < found["naive"]["peak_bytes"] for name, one in found.items() if name != "naive"
    )
    assert found["plan 0.57x"]["memory_met"]
    page = (tmp_path / "report.md").read_text()
    for text in (result.output, page):
        for words in (
            "no: batch norm statistics",
            "efficient DenseNet",
            "wanted at most 0.57: met",
            "machine: ",
        ):
            assert words in text
    assert "| 2 | 4 | naive |" in page
    assert (tmp_path / "densenet.png").stat().st_size > 10_000


def entry(name: str, family: str, mib: int, seconds: list[float], differences: tuple[str, ...] = ()) -> Entry:
    return Entry(name, family, mib * MIB, seconds, list(differences))


def test_ranks_are_put_together_and_judged() -> None:
    slow = [1.0, 10.0]  # the machine is ten times as slow in the second round
    ranks = [
        Answer(1, [entry("naive", "naive", 100, slow), entry("plan", "ours", 50, [1.1, 11.0])]),
        Answer(1, [entry("naive", "naive", 100, []), entry("plan", "ours", 57, [], ("weights",))]),
    ]
    case = Case.of(2, 64, ranks)
    plan = case.entries[1]
    time = case.time(plan)
    assert time is not None and time.median == pytest.approx(1.1)
    assert case.memory(plan) == 0.57, "of the rank that needs most"
    assert case.met(plan) == (True, True)
    assert plan.differences == ["weights"] and not case.sound, "one rank is enough to be wrong"
    assert Case.of(2, 64, ranks[:1]).sound
    official = Answer(1, [ranks[0].entries[0], entry("checkpoint", "official", 50, slow, ("weights",))])
    assert Case.of(1, 64, [official]).sound, "their fault is not ours"


def test_what_did_not_run_is_said() -> None:
    left_out = Case.of(1, 4096, [Answer(2, note="left out: keeping everything would take 9 GiB")])
    failed = Case.of(2, 64, [Answer(0, note="failed: no end after 9 s", failed=True)])
    no_plan = Case.of(
        1, 4, [Answer(1, [entry("naive", "naive", 9, [1.0]), Entry("plan 1MiB", "ours", failure="No plan.")])]
    )
    report = Report("", {}, {}, [left_out, failed, no_plan])
    assert report.remarks() == [
        "1 rank, batch 4096: left out: keeping everything would take 9 GiB",
        "2 ranks, batch 64: failed: no end after 9 s",
        "1 rank, batch 4, plan 1MiB: No plan.",
    ]
    assert [case.sound for case in report.cases] == [True, False, True]
    assert "| 1 | 4 | plan 1MiB | - | - | - | - | does not fit |" in report.markdown()


def test_a_batch_that_does_not_fit_is_told_from_small_ones(tmp_path: Path) -> None:
    base = densenet(22, classes=10)
    needed = step_peak(base, *random_batch(12, 8, seed=0))
    job = Job(tmp_path, 1, 12, 22, 8, ("0.57x",), 16, 1)
    assert too_large(base, job, round(1.05 * needed)) is None
    reason = too_large(base, job, round(0.95 * needed))
    assert reason is not None and "there is room for" in reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "--ranks: '3' is none of 1, 2"),
        (["--batches", "16,5"], "--batches: 5 images cannot be shared by 2 ranks"),
        (["--batches", "few"], "--batches: 'few' is not a number of images"),
        (["--budget", "half"], "--budgets: budget must be bytes"),
        (["--plan-images", "0"], "'--plan-images'"),
        (["--depth", "99"], "'--depth'"),
        (["--depth", "121", "--pixels", "16"], "--pixels: a DenseNet of depth 121 needs at least 32, got 16"),
        (["--output", __file__], "--output: cannot write"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
