"""Predict what communication costs on up to 16,384 ranks. Nothing is measured.

--set changes the model, the ranks of a host, links in Gbit/s and times in microseconds, such as link=100,latency=5; the report
names all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.case import Case, Row, figure, ratio_to
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.report import in_mib
from hvd_ckpt.prediction.training_layout import TrainingLayout

WAYS = {
    "none": 'shard="none"',
    "optimizer": 'shard="optimizer"',
    "gradients": 'shard="gradients"',
    "parameters": 'shard="parameters"',
    "replicas": "replicas=",
    "local": "local SGD",
    "stages": "stages=",
    "tensor": "tensor=",
    "ddp": "PyTorch DDP",
    "fsdp2": "PyTorch FSDP2",
    "ring": "ring reduce-scatter",
}
"""Ways to train, and their titles. The last three are other engines, whose collectives are rings that wait for no cycle of
Horovod's; ``ring`` has gradients in shards, as ZeRO-2."""
BASELINES = ("ddp", "fsdp2", "ring")

SIZES: dict[str, Any] = {
    "batch": 1,  # sequences of a rank in a step
    "vocabulary": 50257,
    "length": 2048,
    "width": 2048,
    "heads": 16,
    "layers": 24,
    "tflops": 50.0,  # of a rank
    "every": 50,  # steps between two averages of local SGD
    "stages": 8,
    "parts": 8,
    "micro_batches": 32,
    "local": 8,  # ranks on a host
    "link": 25.0,  # Gbit/s of a host, shared by its ranks
    "local_link": 100.0,  # Gbit/s of a rank to others on its host
    "latency": 25.0,  # microseconds of an empty message to another host
    "local_latency": 2.0,  # and on a host
    "message": 2.0,  # microseconds of a rank's processor for each message
    "one_level": 0,  # scatter gradients to all ranks at once, not within hosts first
}


def keeps(case: Case) -> bool:
    """Numbers of ranks that can be divided so."""
    if case.np > (local := case.sizes["local"]) and case.np % local:
        raise BadArgument(f"--np {case.np}: give numbers up to local={local}, or multiples of it")
    split = split_of(case)
    return case.np % (split.stages * split.tensor) == 0


def split_of(case: Case) -> TrainingLayout:
    """How ranks train together."""
    sizes, way = case.sizes, case.engine
    stages, parts = sizes["stages"] if way == "stages" else 1, sizes["parts"] if way == "tensor" else 1
    micro_batches = sizes["micro_batches"] if stages > 1 else 1
    return TrainingLayout(
        case.np, stages=stages, tensor=parts, micro_batches=micro_batches, every=sizes["every"]
    )


def points(row: Row, rows: Sequence[Row]) -> Iterator[Point]:
    """Efficiency, and seconds of communication, by the number of ranks."""
    way = row.case.engine
    style = {
        "color": f"C{[*WAYS].index(way) % 10}",
        "marker": "o",
        "linestyle": "--" if way in BASELINES else "-",
    }
    for name in ("efficiency", "communicating") if row.figures else ():
        yield Point(name, WAYS[way], row.case.np, row.over(name), style)


scale = Suite(
    engines=tuple(WAYS),
    workloads=("gpt-1.3b",),
    columns=(
        figure("efficiency", "efficiency", ".1%"),
        figure("communication s", "communicating", ".3f"),
        figure("sent MiB", "sent", in_mib(",.0f")),
    ),
    against={"of FSDP2": ratio_to("fsdp2", "communicating")},
    keeps=keeps,
    sizes={"gpt-1.3b": SIZES},
    np="8,64,512,1024,4096,16384",
    controllers="mpi",
    rounds=1,
    quick={"np": "8,1024"},
    launched=False,
    measure="benchmarks.measures.predictions:step_of",
    lines=Lines(points, shared=False, log=["communicating"]),
    notes=(
        "Every replica has a batch of its own, so the work grows with them. efficiency: the part of a step that is computation. "
        "communication: seconds in which collectives or messages run, hidden or not; of FSDP2: as a ratio to FSDP2's.",
        "sent MiB: of a rank in a step.",
        "ddp, fsdp2, ring: other engines, predicted with ring collectives that wait for no cycle.",
    ),
)
