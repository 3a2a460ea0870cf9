"""From the ranks' events to a judgement: is the result of a cell right, how was it reached, and what did it cost?

A result is *right* if all of this holds: every rank ends with the same parameters, bit for bit; they equal the
reference's; each rank's buffers equal the reference's for that rank; every run of the cell ends in the same bits; each
gradient took part in one reduction per step; and two runs reduced in the same order. If only the last two fail the result is
*loose*: right here, but dearer than it should be, or by luck. Equal to the reference means up to rounding: ranks may sum
in another order than the reference does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_ckpt.app.compare.cells import Cell
from hvd_ckpt.app.compare.runner.jobs import JobError
from hvd_ckpt.app.compare.runner.stats import ratios, slowest
from hvd_ckpt.app.compare.worker import Figures
from hvd_ckpt.app.compare.workloads import CATALOG

ROUNDING = 2e-2  # the tolerance where activations have fewer than 12 bits
WARM_UP = 2  # steps that are not timed: buckets are learned, caches filled
BASELINE = "horovod"  # step times are told as a ratio to this engine's


@dataclass
class Result:
    """The result of one engine in one cell.

    Attributes:
        engine, workload, variant, chunks: the cell.
        status: ``right``, ``loose``, ``wrong``, ``error`` or ``hang``.
        reason: what is wrong, or the error; empty when right.
        ranks_equal: whether all ranks' parameters are equal, bit for bit.
        weights_right, buffers_right: whether they equal the reference's, up to rounding.
        difference, buffer_difference: the largest absolute difference from the reference of a parameter, of a buffer.
        repeatable: whether all runs of the cell ended in the same bits on every rank.
        runs: how many runs that says something about.
        most: reductions of a gradient per step, of the parameter with most; None if unknown.
        same_order: whether two runs reduced in the same order; None if unknown.
        pass_seconds: median time of a step (of its slowest rank) in each timed pass.
        ratio: median over the passes of this time by the baseline's in the same pass.
        peak_bytes: most bytes allocated at one time, weights included, on the rank with most.
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
    most: int | None = None
    same_order: bool | None = None
    pass_seconds: tuple[float, ...] = ()
    ratio: float | None = None
    peak_bytes: int | None = None

    @property
    def right(self) -> bool:
        return self.status == "right"

    @property
    def recomputed(self) -> str:
        """The variant and the number of segments, such as ``reentrant x4``."""
        return self.variant if not self.chunks else f"{self.variant} x{self.chunks}"

    @property
    def step_seconds(self) -> float | None:
        """Median over the passes."""
        return statistics.median(self.pass_seconds) if self.pass_seconds else None


def judge(
    cell: Cell,
    engine: str,
    trainings: Sequence[Sequence[Figures]] | JobError,
    precision: str = "fp32",
) -> Result:
    """Judges one cell from the figures of each rank in each training of it (see :mod:`.worker`), or from its failure.

    The first training has been compared with the reference, some have counted their reductions, and some were timed.
    """
    result = Result(engine, cell.workload, cell.variant, cell.chunks, status="right")
    if isinstance(trainings, JobError):
        result.status, result.reason = trainings.kind, str(trainings)
        return result
    kind, rank_by_rank = CATALOG[cell.workload], list(zip(*trainings))
    figures = [figures for ranks in trainings for figures in ranks]
    result.ranks_equal = all(len({rank["weights"] for rank in ranks}) == 1 for ranks in trainings)
    result.runs = len(trainings)
    result.repeatable = all(
        len({(run["weights"], run["buffers"]) for run in runs}) == 1 for runs in rank_by_rank
    )
    wrong = {"ranks differ": not result.ranks_equal, "runs differ": not result.repeatable}
    tolerance = max(kind.tolerance, 0.0 if precision == "fp32" else ROUNDING)
    off, right = {}, {}
    for what, prefix in (("weights", ""), ("buffers", "buffer_")):
        worst = max(trainings[0], key=lambda rank: rank[f"{prefix}relative"])
        off[what] = max(rank[f"{prefix}difference"] for rank in trainings[0])
        share, name = worst[f"{prefix}relative"], worst[f"{prefix}worst"]
        right[what] = share <= tolerance
        wrong[f"{what} off by {100 * share:.3g} % of what training changes ({name})"] = not right[what]
    result.difference, result.buffer_difference = off.values()
    result.weights_right, result.buffers_right = right.values()
    loose = {}
    recorded = [rank for rank in figures if "order" in rank]
    if recorded:
        result.most = max(rank["most"] for rank in recorded)
        orders = [{run["order"] for run in runs if "order" in run} for runs in rank_by_rank]
        result.same_order = all(len(order) <= 1 for order in orders)
        loose[f"a gradient is reduced {result.most} times in a step"] = kind.static and result.most > 1
        loose["the order of reductions differs between runs"] = not result.same_order
    result.status = "wrong" if any(wrong.values()) else "loose" if any(loose.values()) else "right"
    result.reason = "; ".join(reason for reason, holds in {**wrong, **loose}.items() if holds)
    result.peak_bytes = max((rank["peak_bytes"] for rank in figures if "peak_bytes" in rank), default=None)
    # All wait for the slowest rank of a step.
    timed = [slowest(rank["seconds"] for rank in ranks) for ranks in trainings if "seconds" in ranks[0]]
    result.pass_seconds = tuple(statistics.median(steps[min(WARM_UP, len(steps) - 1) :]) for steps in timed)
    return result


def add_ratios(results: Sequence[Result]) -> None:
    """Give each result its step time relative to the baseline engine's, pass by pass: to its time without recomputation
    where that is among the cells, else to its time in the same cell."""
    baselines = {
        (result.workload, result.variant, result.chunks): result.pass_seconds
        for result in results
        if result.engine == BASELINE and result.pass_seconds
    }
    for result in results:
        same = (result.workload, result.variant, result.chunks)
        baseline = baselines.get((result.workload, "none", 0), baselines.get(same))
        if baseline and len(baseline) == len(result.pass_seconds):
            result.ratio = statistics.median(ratios(result.pass_seconds, baseline))
