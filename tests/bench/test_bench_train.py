"""``hvd-ckpt bench train`` with a tiny model: both loops do the same, and a case in which they do not is not passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvd_ckpt.bench.command import bench
from hvd_ckpt.bench.train.command import Case, RankResult

TINY = ("--models", "gpt-tiny", "--accumulate", "2", "--batch", "2", "--rounds", "3", "--steps", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["train", *arguments])


def test_both_loops_are_timed_and_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny operators on two threads mostly wait for each other
    result = run(*TINY, "--ranks", "2", "--controller", "gloo", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "results.json").read_text())
    (case,) = report["results"]
    assert (case["model"], case["accumulate"], case["differences"]) == ("gpt-tiny", 2, [])
    assert case["passed"]
    assert len(case["trainer"]) == len(case["by_hand"]) == 3
    log = (tmp_path / "jobs" / "0-2" / "run" / "log.jsonl").read_text().splitlines()
    assert len(log) == 7, "3 steps of warm-up, 3 rounds of one step, one that ends the last round"
    for text in (result.output, (tmp_path / "report.md").read_text()):
        for words in ("by hand ms", "gpt-tiny", "command: hvd-ckpt bench train"):
            assert words in text


def test_other_weights_on_one_rank_or_no_result_do_not_pass() -> None:
    good = RankResult(1, [1.0], [1.0])
    assert Case.of("gpt-tiny", 1, 1, [good]).passed
    other = Case.of("gpt-tiny", 4, 1, [good, RankResult(1, [1.0], [1.0], ["0.weight"])])
    assert not other.passed
    assert "0.weight" in (other.remark() or "")
    assert not Case("gpt-tiny", 1, failure="no end after 5 s").passed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "gpt-huge"], "--models: "),
        (["--accumulate", "1,8", "--batch", "4"], "--accumulate: a batch of 4 has fewer samples than 8"),
        (["--accumulate", "x"], "--accumulate: 'x'"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
