"""Time a step and measure its peak with this library's plans and with everything else that recomputes.

Each way has a plan beside it whose budget is the peak of that way. All run in one process, step by step in turn, on equal
parameters. Run it on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.case import Case, Row, ratio_to
from benchmarks.suite import Suite

WAYS = (
    *("sequential-2", "sequential-4", "sequential-8", "sequential-16", "blocks", "blocks-2", "layers"),
    *("matmuls-saved", "half-saved", "attention-saved"),
)


def keeps(case: Case) -> bool:
    """Not every way is one for every model."""
    method = case.engine.removeprefix("plan-")
    chains = {"layers": ("densenet",), "attention-saved": ("gpt", "bert")}
    return case.workload in chains.get(method, (case.workload,))


def of_method(row: Row, rows: Sequence[Row]) -> Any:
    """The time of a plan as a ratio to the way whose peak is its budget."""
    method = row.case.engine.removeprefix("plan-")
    return row.ratio(row.peer(rows, method)) if method != row.case.engine else None


def result(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether loss and gradients are, bit for bit, those without recomputation, and the buffers."""
    same = row.same(row.peer(rows, "none"), "hash", "buffer_hash")
    if same is None:
        return None
    return "bitwise" if all(same) else "running statistics differ" if same[0] else "differs"


def sound(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a plan gives the bits of no recomputation."""
    return not row.case.engine.startswith("plan-") or result(row, rows) in (None, "bitwise")


recompute = Suite(
    engines=("none", *WAYS, *(f"plan-{name}" for name in WAYS), "plan-min"),
    workloads=("gpt", "bert", "densenet", "lstm"),
    columns=("step_peak", "hash"),
    against={
        "of none": "none",
        "of the way": of_method,
        "peak of none": ratio_to("none", "step_bytes"),
        "result": result,
    },
    keeps=keeps,
    quick_sizes={
        "gpt": {"batch": 2, "length": 32, "width": 32, "heads": 2, "layers": 4},
        "bert": {"batch": 2, "length": 16, "width": 32, "heads": 2, "layers": 4, "vocabulary": 100},
        "densenet": {"batch": 2, "depth": 22, "pixels": 8},
        "lstm": {"batch": 2, "length": 8, "width": 16, "layers": 3, "vocabulary": 50},
    },
    np="1",
    rounds=15,
    warm_up=1,
    quick={"rounds": 3},
    together=True,
    sound=sound,
    notes=(
        "peak: bytes that a step (forward pass, loss, backward pass) has allocated at most above its start, where the gradients "
        "are allocated. plan-NAME: this library's plan whose budget is that way's peak; of the way: its time as a ratio to that "
        "way's. result: bitwise where loss, gradients and buffers are those without recomputation.",
    ),
)
