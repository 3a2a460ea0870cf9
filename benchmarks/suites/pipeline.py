"""Time training steps in pipeline stages with this library and torch.distributed.pipelining, in jobs that alternate.

Reports for each schedule the time of a step, its ratio to torch's, the speed-up over one rank without stages as a part of what
the schedule allows, memory of the largest stage, and bytes sent. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.quartiles import quartiles_of_ratios
from benchmarks.suite import Axis, Suite

MICRO_BATCHES = 8


def keeps(case: Case) -> bool:
    """The unstaged model on one rank, all others on more; torch.distributed.pipelining has no recomputation of its own."""
    if case.engine == "unstaged":
        return case.np == 1 and case.at == {"schedule": "1f1b", "recompute": "never"}
    return case.np > 1 and (case.engine != "torch-stages" or case.at["recompute"] == "never")


def options(case: Case) -> Mapping[str, Any]:
    """The same cuts for all engines."""
    sizes = tuple(case.sizes.items())
    return {
        "balance": balance(case.workload, sizes, case.np),
        "micro_batches": MICRO_BATCHES,
        "schedule": case.at["schedule"],
        "checkpoint": case.at["recompute"],
    }


@functools.cache
def balance(name: str, sizes: tuple[tuple[str, Any], ...], stages: int) -> list[int]:
    """The number of blocks of each stage, such that all take about as long."""
    import torch

    from benchmarks.workloads import workload
    from hvd_ckpt.parallel.pipeline.balance import balance_costs, block_costs

    trained, threads = workload(name, dict(sizes)), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sample = trained.draw(0, 0)[0].tensor_split(MICRO_BATCHES)[0]
    found = balance_costs(block_costs("time", trained.model(), sample, seconds=0.2), stages)
    torch.set_num_threads(threads)
    return found


def unstaged(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the whole model on one rank."""
    alone = (row.case.workload, row.case.controller)
    same = (other for other in rows if other.case.engine == "unstaged")
    return next((other for other in same if (other.case.workload, other.case.controller) == alone), None)


def of_ideal(row: Row, rows: Sequence[Row]) -> Any:
    """How many times faster than on one rank, as a part of what the schedule allows."""
    whole = unstaged(row, rows)
    if whole is None or whole is row:
        return None
    # A schedule of p ranks with m micro-batches takes m + p - 1 slots for each direction, of which a rank works in m:
    #
    #     rank 0   F0 F1 F2 F3 -  -  B3 B2 B1 B0       p = 2, m = 4: one slot of each direction is idle
    #     rank 1   -  F0 F1 F2 F3 B3 B2 B1 B0 -
    size = row.case.np
    ideal = size * MICRO_BATCHES / (MICRO_BATCHES + size - 1)
    return quartiles_of_ratios([seconds / ideal for seconds in whole.seconds], row.seconds)


def of_unstaged(row: Row, rows: Sequence[Row]) -> Any:
    """The peak as a ratio to that of the whole model on one rank."""
    return row.peak_ratio(unstaged(row, rows))


pipeline = Suite(
    engines=("unstaged", "stages", "torch-stages"),
    workloads=("gpt", "resnet"),
    columns=("peak", "sent"),
    against={"of torch-stages": "torch-stages", "of ideal": of_ideal, "peak of unstaged": of_unstaged},
    axes={
        "schedule": Axis("Schedules.", ("gpipe", "1f1b")),
        "recompute": Axis("What stages recompute.", ("never", "always")),
    },
    keeps=keeps,
    options=options,
    sizes={"gpt": {"batch": 8, "length": 128, "layers": 8}},
    quick_sizes={
        "gpt": {"batch": 8, "length": 32, "width": 32, "heads": 2, "layers": 4},
        "resnet": {"batch": 8, "depth": 20, "pixels": 8},
    },
    np="1,2,4",
    controllers="gloo,mpi",
    rounds=5,
    steps=5,
    warm_up=2,
    quick={"np": "1,2", "rounds": 1, "steps": 1, "controller": "gloo"},
    optimizer="AdamW",
    lr=1e-4,
    threads=1,
    notes=(
        "Every rank has one thread, every stage one replica; all engines have the same cuts, schedule, micro-batches and "
        "optimizer. Unstaged: one rank with the whole model, which runs the same micro-batches one after the other.",
        "of ideal: how many times faster than the unstaged rank, as a part of p m / (m + p - 1) for p ranks and m micro-batches. 1 "
        "means that ranks wait no longer than the schedule makes them.",
    ),
)
