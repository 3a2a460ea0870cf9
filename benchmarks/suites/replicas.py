"""Train as logical replicas on several numbers of ranks, and compare what comes of it bit for bit.

Each run is trained to the end on every number of ranks, and once more from the middle of the run before, on another number of
ranks or over another controller. A picture has the losses of a GPT, with stock Horovod and as logical replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.case import Case, Row, figure
from benchmarks.pictures import Line, draw_lines
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument

RUNS = (
    "gpt-clipped",
    "gpt-bf16",
    "gpt-fp16",
    "bert-plan",
    "bert-shards",
    "densenet-short",
    "resnet-deferred",
)
"""Training runs, by their names in :mod:`benchmarks.replicated`."""
LOSSES = "losses"


def keeps(case: Case) -> bool:
    """Losses are also those of stock Horovod; one rank is the same over every controller."""
    replicas = case.sizes["replicas"]
    if replicas & (replicas - 1) or case.np & (case.np - 1) or case.np > replicas:
        raise BadArgument(f"--np {case.np}: give powers of two up to replicas={replicas}, a power of two")
    trained = ("whole", "horovod") if case.workload == LOSSES else ("whole", "resumed")
    return case.engine in trained and (case.np > 1 or case.controller == "gloo")


def same(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether a run has one hash everywhere; stock Horovod's may differ."""
    mine = [other for other in rows if other.case.workload == row.case.workload]
    hashes = {
        found for other in mine if other.case.engine != "horovod" for found in other.figures.get("hash", ())
    }
    return None if row.case.engine == "horovod" or not hashes else "yes" if len(hashes) == 1 else "NO"


def draw(folder: Path, rows: Sequence[Row]) -> list[str]:
    """For each engine, how far the losses are from those on the smallest number of ranks."""
    panels: dict[str, list[Line]] = {"stock Horovod": [], "logical replicas": []}
    for engine, lines in zip(("horovod", "whole"), panels.values()):
        runs = {
            row.case.np: row.figures["losses"][0]
            for row in rows
            if row.case.engine == engine and "losses" in row.figures
        }
        for number, (size, losses) in enumerate(sorted(runs.items())):
            apart = [loss - other for loss, other in zip(losses, runs[min(runs)])]
            # Lines get thinner, so that several of the same values can be told from one.
            style = {"label": f"np={size}", "linewidth": 1.5 * (len(runs) - number)}
            lines.append(Line(dict(enumerate(apart, start=1)), style))
    return draw_lines(folder / "losses.png", panels, "step", "loss, relative to the fewest ranks")


replicas = Suite(
    engines=("whole", "resumed", "horovod"),
    workloads=(*RUNS, LOSSES),
    columns=(
        figure("hash", "hash", over=lambda ranks: ranks[0]),
        figure("skipped steps", "skipped", over=lambda ranks: ranks[0] or None),
    ),
    against={"one hash": same},
    keeps=keeps,
    sizes={name: {"replicas": 4, "steps": 6} for name in RUNS} | {LOSSES: {"replicas": 4, "steps": 60}},
    quick_sizes={name: {"replicas": 4, "steps": 4} for name in (*RUNS, LOSSES)},
    np="4,1,2",  # neighbours differ most
    controllers="gloo,mpi",
    rounds=1,
    quick={"controller": "gloo", "workloads": "gpt-fp16,densenet-short"},
    threads=1,
    sound=lambda row, rows: same(row, rows) != "NO",
    worker="benchmarks.replicated:measure",
    draw=draw,
    notes=(
        "hash: of the weights, the buffers, the optimizer's state, the loss scale, and all logged losses and evaluations of a run; "
        "of losses, of these alone. skipped steps: by the loss scale.",
        "The runs are those of `hvd-ckpt train --replicas`, with tiny models and one CPU thread on each rank.",
    ),
)
