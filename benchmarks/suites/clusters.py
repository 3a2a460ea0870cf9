"""The layouts that ``hvd-ckpt layout --ranks`` chooses for clusters of up to 16,384 ranks. Nothing is measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case, Row
from benchmarks.suite import Axis, Suite
from benchmarks.suites.scale import GPT
from benchmarks.worker import Found, MeasuredJob
from hvd_ckpt.app.compare.runner.report import Column, save_figure
from hvd_ckpt.app.models.gpt import gpt
from hvd_ckpt.prediction.computation import Sample, counted
from hvd_ckpt.prediction.layouts import Job as Layouts
from hvd_ckpt.prediction.network import Network

CLUSTER = {
    "batch": 4,
    "tflops": 200.0,
    "local": 8,
    "local_link": 2400.0,
}  # samples of a rank; Gbit/s of a rank


def predict(job: MeasuredJob) -> list[Found]:
    """What comes of each case."""
    return [predicted(case) for case in job.cases]


def predicted(case: Case) -> Found:
    """The fastest layout, and the fastest of those in which each rank is a replica."""
    sizes = case.sizes
    network = Network(min(sizes["local"], case.np), case.at["link"] * 1e9 / 8, sizes["local_link"] * 1e9 / 8)
    layouts, ideal = layouts_of(*(sizes[name] for name in ("tflops", *GPT)))
    batch = case.np * sizes["batch"]
    # Computation depends on none of these, and is counted once.
    layouts = dataclasses.replace(
        layouts, ranks=case.np, batch=batch, network=network, memory=sizes["memory"] << 30
    )
    fit = [row for row in layouts.rows() if row.fits]
    if not fit:
        return {"seconds": [], "failure": "no layout fits"}
    best, alone = fit[0], next((row for row in fit if row.layout.replicas == case.np), None)
    return {
        "seconds": [best.seconds],
        "layout": str(best.layout),
        "limit": best.limit,
        "recomputing": best.recomputing,
        "efficiency": ideal * sizes["batch"] / best.seconds,
        "alone_layout": None if alone is None else str(alone.layout),
        "alone_efficiency": None if alone is None else ideal * sizes["batch"] / alone.seconds,
    }


@functools.cache
def layouts_of(tflops: float, *sizes: int) -> tuple[Layouts, float]:
    """The layouts of a model, whose cluster is filled in, and seconds of a sample on a rank that only computes."""
    shape: dict[str, Any] = dict(zip(GPT, sizes))
    with torch.device("meta"):
        model = gpt(**shape)

    def sample(samples: int) -> Sample:
        tokens = torch.zeros(samples, shape["length"], dtype=torch.long, device="meta")
        return Sample((tokens,), {}, None)

    once = counted(model, sample(1), tflops * 1e12)
    ideal = sum(block.choices[0].seconds for block in once.chain)
    return Layouts(model, 1, 0, 1, Network(), sample).counted(tflops), ideal


def draw(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Efficiency by the number of ranks: of the fastest layout, and dashed of the fastest in which each rank is a replica."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.figures]
    models = list(dict.fromkeys(row.case.workload for row in rows))
    if not models:
        return []
    figure = Figure(figsize=(6 * len(models), 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False, sharey=True)[0], models):
        links = dict.fromkeys(row.case.at["link"] for row in rows)
        for number, link in enumerate(links):
            own = [row for row in rows if (row.case.workload, row.case.at["link"]) == (model, link)]
            for name, style in (("efficiency", "-"), ("alone_efficiency", "--")):
                found = [row for row in own if row.over(name) is not None]
                what = "" if name == "efficiency" else ", each rank a replica"
                axes.plot(
                    [row.case.np for row in found],
                    [row.over(name) for row in found],
                    style,
                    marker="o",
                    color=f"C{number}",
                    label=f"{link} Gbit/s{what}",
                )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="ranks", title=f"{model}, predicted")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].legend(fontsize=8)
    return [save_figure(figure, folder / "clusters.png")]


def figure(title: str, name: str, form: Any = "", left: bool = False) -> Column:
    """A predicted figure."""
    return Column(title, lambda row: row.over(name), form, key=name, left=left)


clusters = Suite(
    name="clusters",
    title="Layouts of large clusters, predicted",
    help="""Predict which layout is fastest on up to 16,384 ranks, and why. Nothing is measured.

    --set changes the model, its samples and memory (GiB) on each rank, TFLOP/s, the ranks of a host, and Gbit/s within a host.
    """,
    engines=("layout",),
    workloads={"gpt-1.3b": "", "gpt-13b": ""},
    columns=(
        figure("layout", "layout", left=True),
        figure("limit", "limit", left=True),
        figure("recomputing", "recomputing", ".0%"),
        figure("efficiency", "efficiency", ".0%"),
        figure("each rank a replica", "alone_layout", left=True),
        figure("efficiency of that", "alone_efficiency", ".0%"),
    ),
    axes={"link": Axis("Gbit/s of a host.", {"25": 25, "400": 400})},
    options=lambda case: {},
    sizes={
        "gpt-1.3b": {**CLUSTER, "memory": 40, **dict(zip(GPT, (50257, 2048, 2048, 16, 24)))},
        "gpt-13b": {**CLUSTER, "memory": 80, **dict(zip(GPT, (50257, 2048, 5120, 40, 40)))},
    },
    quick_sizes={"gpt-1.3b": {**CLUSTER, "memory": 1, **dict(zip(GPT, (512, 128, 256, 8, 4)))}},
    np="8,64,1024,16384",
    controllers="mpi",
    rounds=1,
    quick={"np": "8", "workloads": "gpt-1.3b"},
    launched=False,
    worker="benchmarks.suites.clusters:predict",
    draw=draw,
    notes=(
        "efficiency: computation without recomputation, as a part of a step. limit: what takes more than 15 % of a step.",
        "Every rank adds samples, so that the global batch grows with them.",
    ),
)
