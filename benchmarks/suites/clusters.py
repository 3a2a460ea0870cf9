"""Predict which layout is fastest on up to 16,384 ranks, and why. Nothing is measured.

--set changes the model, its samples and memory (GiB) on each rank, TFLOP/s, the ranks of a host, and Gbit/s within a host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.case import Row, figure
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Axis, Suite

GPT = {"vocabulary": 50257, "length": 2048}
QUICK = {"memory": 1, "vocabulary": 512, "length": 128, "width": 256, "heads": 8, "layers": 4}
CLUSTER = {
    "batch": 4,
    "tflops": 200.0,
    "local": 8,
    "local_link": 2400.0,
}  # samples of a rank; Gbit/s of a rank
LINKS = ("25", "400")


def points(row: Row, rows: Sequence[Row]) -> Iterator[Point]:
    """Efficiency by the number of ranks: of the fastest layout, and dashed of the fastest in which each rank is a replica."""
    link = row.case.at["link"]
    for name, what, linestyle in (("", "", "-"), ("alone_", ", each rank a replica", "--")):
        value = row.over(f"{name}efficiency")
        if value is not None:
            style = {"color": f"C{LINKS.index(link)}", "marker": "o", "linestyle": linestyle}
            yield Point(f"{row.case.workload}, predicted", f"{link} Gbit/s{what}", row.case.np, value, style)


clusters = Suite(
    engines=("layout",),
    workloads=("gpt-1.3b", "gpt-13b"),
    columns=(
        figure("layout", "layout"),
        figure("limit", "limit"),
        figure("recomputing", "recomputing", ".0%"),
        figure("efficiency", "efficiency", ".0%"),
        figure("each rank a replica", "alone_layout"),
        figure("efficiency of that", "alone_efficiency", ".0%"),
    ),
    axes={"link": Axis("Gbit/s of a host.", LINKS)},
    sizes={
        "gpt-1.3b": {**CLUSTER, "memory": 40, **GPT, "width": 2048, "heads": 16, "layers": 24},
        "gpt-13b": {**CLUSTER, "memory": 80, **GPT, "width": 5120, "heads": 40, "layers": 40},
    },
    quick_sizes={"gpt-1.3b": {**CLUSTER, **QUICK}},
    np="8,64,1024,16384",
    controllers="mpi",
    rounds=1,
    quick={"np": "8", "workloads": "gpt-1.3b"},
    launched=False,
    measure="benchmarks.measures.predictions:layout_of",
    lines=Lines(points, y="efficiency"),
    notes=(
        "efficiency: computation without recomputation, as a part of a step. limit: what takes more than 15 % of a step.",
        "Every rank adds samples, so that the global batch grows with them.",
    ),
)
