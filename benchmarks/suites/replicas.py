"""Logical replicas: hashes of training runs on several numbers of ranks (the runs are in ``tests/same_bits``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.report import Column, save_figure

RUNS = (
    "gpt-clipped",
    "gpt-bf16",
    "gpt-fp16",
    "bert-plan",
    "bert-shards",
    "densenet-short",
    "resnet-deferred",
)
"""Training runs, by their names in ``tests/same_bits/job.py``."""
LOSSES = "losses"
ENGINES = ("whole", "resumed", "horovod")


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
    from matplotlib.figure import Figure

    runs = {
        (row.case.engine, row.case.np): row.figures["losses"][0] for row in rows if "losses" in row.figures
    }
    if not runs:
        return []
    figure, first = Figure(figsize=(11, 3.6)), min(size for _, size in runs)
    engines = {"horovod": "stock Horovod", "whole": "logical replicas"}
    for axes, (engine, title) in zip(figure.subplots(1, 2, sharey=True), engines.items()):
        own = {
            size: losses
            for (name, size), losses in sorted(runs.items())
            if name == engine and (name, first) in runs
        }
        for number, (size, losses) in enumerate(own.items()):
            apart = [loss - other for loss, other in zip(losses, own[first])]
            # Lines get thinner, so that several of the same values can be told from one.
            axes.plot(
                range(1, len(apart) + 1), apart, label=f"np={size}", linewidth=1.5 * (len(own) - number)
            )
        axes.set(title=title, xlabel="step")
        if own:
            axes.legend()
    figure.axes[0].set_ylabel(f"training loss, relative to\nnp={first}")
    return [save_figure(figure, folder / "losses.png")]


def _column(title: str, key: str) -> Column:
    def of(row: Row) -> Any:
        return row.over(key, lambda ranks: ranks[0]) or None

    return Column(title, of, key=key, left=True)


replicas = Suite(
    name="replicas",
    title="Logical replicas: one hash on any number of ranks",
    help="""Train as logical replicas on several numbers of ranks, and compare what comes of it bit for bit.

    Each run is trained to the end on every number of ranks, and once more from the middle of the run before, on another number of
    ranks or over another controller. A picture has the losses of a GPT, with stock Horovod and as logical replicas.
    """,
    engines=ENGINES,
    workloads=dict.fromkeys((*RUNS, LOSSES), ""),
    columns=(_column("hash", "hash"), _column("skipped steps", "skipped")),
    against={"one hash": same},
    keeps=keeps,
    sizes={name: {"replicas": 4, "steps": 6} for name in RUNS} | {LOSSES: {"replicas": 4, "steps": 60}},
    quick_sizes={name: {"replicas": 4, "steps": 4} for name in (*RUNS, LOSSES)},
    np="4,1,2",  # neighbours differ most
    controllers="gloo,mpi",
    rounds=1,
    quick={"controller": "gloo", "workloads": "gpt-fp16,densenet-short"},
    timed=False,
    threads=1,
    sound=lambda row, rows: same(row, rows) != "NO",
    worker="same_bits.job:measure",
    draw=draw,
    notes=(
        "hash: of the weights, the buffers, the optimizer's state, the loss scale, and all logged losses and evaluations of a run; "
        "of losses, of these alone. skipped steps: by the loss scale.",
        "The runs are those of `hvd-ckpt train --replicas`, with tiny models and one CPU thread on each rank.",
    ),
)
