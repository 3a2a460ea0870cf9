"""From the ranks' events to a judgement: is the result of a cell right, and what did it cost?

A result is right if all of this holds: every rank ends with the same parameters, bit for bit; they equal the
reference's; each rank's buffers equal the reference's for that rank; and every run of the cell ends in the same bits.
Equal to the reference means up to rounding: ranks may sum in another order than the reference does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ckpt.comparison.cells import Cell
from hvd_ckpt.comparison.events import Event
from hvd_ckpt.comparison.launch import Failure

__all__ = ["BASELINE", "TOLERANCE", "Result", "add_ratios", "judge"]

TOLERANCE = 1e-3  # of what training changed; a lost or doubled gradient is off by a tenth or more
WARM_UP = 2  # steps that are not timed: buckets are learned, caches filled
BASELINE = "horovod"  # step times are told as a ratio to this engine's without recomputation


@dataclass
class Result:
    """What is known of one engine in one cell.

    Attributes:
        engine, workload, variant, chunks: the cell.
        status: ``right``, ``wrong``, ``error`` or ``hang``.
        reason: what is wrong, or the error; empty when right.
        ranks_equal: whether all ranks' parameters are equal, bit for bit.
        weights_right, buffers_right: whether they equal the reference's, up to rounding.
        difference, buffer_difference: the largest absolute difference from the reference of a parameter, of a buffer.
        repeatable: whether all runs of the cell ended in the same bits on every rank.
        runs: how many runs that says something about.
        step_seconds: median time of a step (of its slowest rank).
        ratio: median over the passes of this time by the baseline's in the same pass.
        peak_bytes: most bytes allocated at one time, weights included, on the rank with most.
        losses: mean loss of all ranks before the first and before the last step.
    """

    engine: str
    workload: str
    variant: str
    chunks: int
    status: str
    reason: str = ""
    ranks_equal: bool | None = None
    weights_right: bool | None = None
    buffers_right: bool | None = None
    difference: float | None = None
    buffer_difference: float | None = None
    repeatable: bool | None = None
    runs: int = 0
    step_seconds: float | None = None
    pass_seconds: tuple[float, ...] = ()
    ratio: float | None = None
    peak_bytes: int | None = None
    losses: tuple[float, float] | None = None

    @property
    def right(self) -> bool:
        return self.status == "right"


def judge(
    cell: Cell, engine: str, passes: Sequence[Sequence[Event]], failure: Failure | None, size: int
) -> Result:
    """Judge one cell from the events of each pass; ``failure`` says why there may be none."""
    result = Result(engine, cell.workload, cell.variant, cell.chunks, status="right")
    if failure:
        result.status, result.reason = failure.kind, failure.message
        return result
    mine = [[event for event in events if event.get("cell") == cell.key] for events in passes]
    trained = [event for events in mine for event in events if event["event"] == "trained"]
    hashed = [event for events in mine for event in events if "weights" in event]

    result.ranks_equal = all(
        len({event["weights"] for event in events if event["event"] == kind}) <= 1
        for events in mine
        for kind in ("trained", "measured")
    )
    result.difference = max(float(event["difference"]) for event in trained)
    result.buffer_difference = max(float(event["buffer_difference"]) for event in trained)
    result.runs = len(hashed) // size
    result.repeatable = all(
        len({(event["weights"], event["buffers"]) for event in hashed if event["rank"] == rank}) == 1
        for rank in range(size)
    )
    weights = max(trained, key=lambda event: float(event["relative"]))
    buffers = max(trained, key=lambda event: float(event["buffer_relative"]))
    result.weights_right = float(weights["relative"]) <= TOLERANCE
    result.buffers_right = float(buffers["buffer_relative"]) <= TOLERANCE

    reasons = []
    if not result.ranks_equal:
        reasons.append("ranks differ")
    for kind, right, worst, prefix in (
        ("weights", result.weights_right, weights, ""),
        ("buffers", result.buffers_right, buffers, "buffer_"),
    ):
        if not right:
            share, name = float(worst[f"{prefix}relative"]), worst[f"{prefix}worst"]
            reasons.append(f"{kind} off by {100 * share:.3g} % of what training changes ({name})")
    if not result.repeatable:
        reasons.append("runs differ")
    if reasons:
        result.status, result.reason = "wrong", "; ".join(reasons)

    result.pass_seconds = tuple(statistics.median(_step_seconds(events)) for events in mine)
    result.step_seconds = statistics.median([second for events in mine for second in _step_seconds(events)])
    result.peak_bytes = max((event["peak_bytes"] for event in hashed if "peak_bytes" in event), default=None)
    first, last = (statistics.fmean(float(event["losses"][step]) for event in trained) for step in (0, -1))
    result.losses = (first, last)
    return result


def add_ratios(results: Sequence[Result]) -> None:
    """Give each result its step time relative to the baseline engine's without recomputation, pass by pass."""
    baselines = {
        result.workload: result.pass_seconds
        for result in results
        if result.engine == BASELINE and result.variant == "none" and result.pass_seconds
    }
    for result in results:
        baseline = baselines.get(result.workload)
        if baseline and len(baseline) == len(result.pass_seconds):
            ratios = [mine / theirs for mine, theirs in zip(result.pass_seconds, baseline, strict=True)]
            result.ratio = statistics.median(ratios)


def _step_seconds(events: Sequence[Event]) -> list[float]:
    """The time of each step after the warm-up: that of the slowest rank, as all wait for it."""
    ranks = [event["seconds"] for event in events if event["event"] == "trained"]
    steps = [max(seconds) for seconds in zip(*ranks, strict=True)]
    return steps[min(WARM_UP, len(steps) - 1) :]
