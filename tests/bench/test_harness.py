"""The benchmark's arithmetic: what a job's time is, what a ratio is, and in which order jobs run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_ckpt.bench import reduce
from hvd_ckpt.bench.job import Answer
from hvd_ckpt.bench.launch import JobError
from hvd_ckpt.bench.reduce import Plan, Quartiles, job_seconds, quartiles


def test_a_step_takes_as_long_as_its_slowest_rank_and_a_job_as_long_as_its_median_step() -> None:
    assert job_seconds([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]]) == 3.0


def test_quartiles() -> None:
    assert quartiles([4.0]) == Quartiles(4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(3.0, 2.0, 4.0)


def test_jobs_alternate_and_ratios_are_taken_within_a_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []
    times = iter([1.0, 2.0, 20.0, 10.0])  # the machine is ten times as slow in the second pair

    def run_job(job, controller, environment, timeout):
        order.append(job.engine)
        if job.engine == "broken":
            raise JobError("it broke")
        seconds = next(times)
        return [
            Answer(1, {"densenet": [seconds]}, {"densenet": 100 + rank} if job.memory else {})
            for rank in (0, 1)
        ]

    monkeypatch.setattr(reduce, "run_job", run_job)
    plan = Plan(("ours", "broken", "theirs"), (2,), ("gloo",), ("densenet",), 2, None, 1.0, tmp_path)
    (case,) = plan.run()
    assert order == ["ours", "broken", "theirs", "theirs", "ours"]
    assert case.ratio("ours", "theirs") == Quartiles(0.5, 0.5, 0.5)
    assert case.gradient_bytes == {"ours": 101, "theirs": 101}
    assert case.failures == {"broken": "it broke"}
    assert case.ratio("ours", "broken") is None
