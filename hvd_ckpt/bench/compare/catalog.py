"""Everything that can be trained, by name: the workloads and the scenarios."""

from __future__ import annotations

from hvd_ckpt.bench.compare.scenarios import SCENARIOS
from hvd_ckpt.bench.compare.workloads import WORKLOADS, Workload

__all__ = ["CATALOG", "make_workload"]

CATALOG: dict[str, type[Workload]] = {**WORKLOADS, **SCENARIOS}


def make_workload(name: str, scale: str, seed: int, text: str | None) -> Workload:
    """The workload or scenario of that name at one of the scales; ``text`` is a file for those that read text."""
    return CATALOG[name](scale, seed, text)
