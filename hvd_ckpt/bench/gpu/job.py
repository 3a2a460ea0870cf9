"""The job of one check and its outcome on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvd_ckpt.bench.harness.jobs import RankJob


@dataclass(frozen=True)
class CheckJob(RankJob):
    """The ranks of one check.

    Attributes:
        check: module and function, such as ``"checks.operations"``.
        device: ``"cuda"`` or ``"cpu"``.
        tiny: small sizes, for a dry run.
    """

    worker = "hvd_ckpt.bench.gpu.worker"

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
