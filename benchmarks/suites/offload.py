"""Time a step and measure its memory where shards are in files.

They are in the folder of the report: give an --output on the disk that is to be used, on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.case import Row
from benchmarks.suite import Axis, Suite


def of_none(row: Row, rows: Sequence[Row]) -> Any:
    """Time as a ratio to that where nothing is in files."""
    condition = {**row.case.condition, "offload": "none"}
    base = next((other for other in rows if other.case.condition == condition), None)
    return None if base is row else row.ratio(base)


offload = Suite(
    engines=("stage-3",),
    workloads=("linear",),
    columns=("peak", "held"),
    against={"of none": of_none},
    axes={"offload": Axis("What is in files.", ("none", "optimizer", "parameters"))},
    options=lambda case: {} if case.at["offload"] == "none" else {"offload": case.at["offload"]},
    quick_sizes={"linear": {"layers": 2, "width": 64, "batch": 8}},
    np="1",
    rounds=6,
    warm_up=2,
    optimizer="AdamW",
    together=True,
    threads=1,
)
