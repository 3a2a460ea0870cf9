"""``hvd-ckpt bench train`` with a tiny model: that both loops do the same, what it reports, and what it makes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.train.job import Answer
from hvd_ckpt.bench.train.report import Case, Report

TINY = ("--models", "gpt-tiny", "--accumulate", "2", "--batch", "2", "--rounds", "3", "--steps", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["train", *arguments])


def test_both_loops_are_timed_and_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny operators on two threads mostly wait for each other
    result = run(*TINY, "--ranks", "2", "--controller", "gloo", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "results.json").read_text())
    (case,) = report["results"]
    assert (case["model"], case["accumulate"], case["differences"], case["sound"]) == (
        "gpt-tiny",
        2,
        [],
        True,
    )
    assert len(case["trainer"]) == len(case["by_hand"]) == 3
    log = (tmp_path / "jobs" / "0-2" / "run" / "log.jsonl").read_text().splitlines()
    assert len(log) == 7, "3 steps of warm-up, 3 rounds of one step, one that ends the last round"
    page = (tmp_path / "report.md").read_text()
    for text in (result.output, page):
        for words in ("by hand ms", "gpt-tiny", "wanted at most 1.02", "command: hvd-ckpt bench train"):
            assert words in text


def test_ratios_are_of_the_slowest_rank_within_each_round() -> None:
    ranks = [Answer(1, [2.0, 6.0, 5.0], [2.0, 3.0, 4.0]), Answer(1, [4.0, 3.0, 4.0], [1.0, 6.0, 5.0])]
    case = Case.of("gpt-tiny", 1, 2, ranks)
    assert (case.trainer, case.by_hand) == ([2.0, 3.0, 2.5], [1.0, 3.0, 2.5])
    assert case.ratio is not None
    assert (case.ratio.low, case.ratio.median, case.ratio.high) == (1.0, 1.0, 1.5)
    assert case.sound
    assert case.remark().endswith("1.000 of the loop by hand, wanted at most 1.02: met")


def test_other_weights_on_one_rank_or_no_answer_make_a_report_unsound() -> None:
    good = Answer(1, [1.0], [1.0])
    other = Case.of("gpt-tiny", 4, 1, [good, Answer(1, [1.0], [1.0], ["0.weight"])])
    assert (
        "the loops have not done the same: 1 weights or buffers differ, the first is 0.weight"
        in other.remark()
    )
    failed = Case.of("gpt-tiny", 1, 1, [Answer(0, failure="no end after 5 s (log: l)")])
    assert failed.remark() == "gpt-tiny, 1 micro-batch: failed: no end after 5 s (log: l)"
    for case in (other, failed):
        report = Report("", {}, {}, [Case.of("gpt-tiny", 1, 1, [good]), case])
        assert not report.sound
        assert case.remark() in report.markdown()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "gpt-huge"], "--models: "),
        (["--accumulate", "1,8", "--batch", "4"], "--accumulate: a batch of 4 has fewer samples than 8"),
        (["--accumulate", "x"], "--accumulate: 'x' is not a number of micro-batches"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
