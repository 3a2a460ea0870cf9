"""The job of one check, its outcome on a rank, and what each rank calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hvd_ckpt.app.compare.runner.jobs import RankJob


@dataclass(frozen=True)
class CheckJob(RankJob):
    """The ranks of one check.

    Attributes:
        check: module and function, such as ``"checks.operations"``, and numbers that it takes: ``"ranks.divided:2,1"``.
        device: ``"cuda"`` or ``"cpu"``.
        tiny: small sizes, for a dry run.
    """

    worker = "gpu.job:run_check"

    check: str
    device: str
    tiny: bool


@dataclass
class Outcome:
    """The outcome of a check that did not fail.

    Attributes:
        text: one line for the report.
        values: for programs.
        skipped: the check cannot run here, for the reason in ``text``.
    """

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False


def run_check(job: CheckJob) -> Outcome:
    """Calls the function of the check."""
    name, _, numbers = job.check.partition(":")
    module, _, function = name.partition(".")
    return getattr(import_module(f"gpu.{module}"), function)(
        job, *map(int, numbers.split(",") if numbers else ())
    )
