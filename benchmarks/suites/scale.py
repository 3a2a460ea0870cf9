"""Predict what communication costs on up to 16,384 ranks. Nothing is measured.

--set changes the model, the ranks of a host, links in Gbit/s and times in microseconds, such as link=100,latency=5; the report
names all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.case import Case, Found, Row, figure, ratio_to
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.report import in_mib
from hvd_ckpt.app.models.gpt import GPTBlock, gpt
from hvd_ckpt.prediction.network import Network
from hvd_ckpt.prediction.step_time import BASELINES, WAYS, ModelSizes
from hvd_ckpt.prediction.training_layout import TrainingLayout

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
# Measured on one core of a virtual machine:
UNPICKLING = 5e-6  # seconds, of a small object
CONNECTING = 350e-6  # seconds that the launcher's server takes for one question of a rank
# Assumed:
IMPORTING = 5.0  # seconds, of Python, PyTorch and Horovod


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


def predicted(case: Case) -> Found:
    """A step and a start; of local SGD a step is the mean up to an average."""
    sizes = case.sizes
    gigabits = {f"{where}bandwidth": sizes[f"{where}link"] * 1e9 / 8 for where in ("", "local_")}
    times = {name: sizes[name] * 1e-6 for name in ("latency", "local_latency", "message")}
    network = Network(
        sizes["local"], controller=case.controller, one_level=bool(sizes["one_level"]), **gigabits, **times
    )
    shape = {name: sizes[name] for name in ("vocabulary", "length", "width", "heads", "layers")}
    model = sizes_of(sizes["tflops"], sizes["batch"], **shape)
    step = model.step(case.engine, split_of(case), network)
    steps = sizes["every"] if case.engine == "local" else 1
    other = case.engine in BASELINES
    return {
        "seconds": [step.seconds / steps],
        "efficiency": step.efficiency,
        "communicating": step.communicating / steps,
        "sent": step.sent / steps,
        "start": None if other else start(case.engine, model.model, network, case.np),
    }


@functools.cache
def sizes_of(tflops: float, batch: int, **shape: Any) -> ModelSizes:
    """The sizes of the model, each layer of which is recomputed; its blocks take as long as their operations."""
    length, width = shape["length"], shape["width"]
    tokens = batch * length
    with torch.device("meta"):
        model = gpt(**shape, checkpoint_interval=1)

    def operations(block: nn.Module) -> float:
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        matrices = sum(module.weight.numel() for module in linear)
        # All pairs count, as in the formulas of Megatron-LM and PaLM by which rates are stated, although half would do if causal.
        attention = 2 * length * width if isinstance(block, GPTBlock) else 0
        return float(2 * tokens * (matrices + attention))

    forward = [operations(block) / (tflops * 1e12) for block in model]
    # The recomputation takes one forward pass, and the gradients of inputs and of weights another one each.
    backward = [3 * seconds for seconds in forward]
    return ModelSizes(model, forward, backward, activation=tokens * width * 4)


def start(way: str, model: nn.Module, network: Network, ranks: int) -> float:
    """Seconds from the launch to the first step: processes, the comparison of all options and parameters, and rank 0's weights.

    Over Gloo each rank asks the launcher's server for the address of each other rank. Over MPI connections are made when they are
    needed.
    """
    processes = IMPORTING + (ranks**2 * CONNECTING if network.controller == "gloo" else 0.0)
    objects = network.objects(512, ranks).seconds + ranks * UNPICKLING
    # The optimizer broadcasts in some ways, and the user's own call in all.
    copies = 2 if way in ("optimizer", "gradients", "local") else 1
    weights = sum(network.broadcast(parameter.nbytes, ranks).seconds for parameter in model.parameters())
    return processes + 2 * objects + network.agreement(ranks).seconds + copies * weights


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
        figure("start s", "start", ".1f"),
    ),
    against={"of FSDP2": ratio_to("fsdp2", "communicating")},
    keeps=keeps,
    sizes={"gpt-1.3b": SIZES},
    np="8,64,512,1024,4096,16384",
    controllers="mpi",
    rounds=1,
    quick={"np": "8,1024"},
    launched=False,
    measure=lambda job: [predicted(case) for case in job.cases],
    lines=Lines(points, shared=False, log=["communicating"]),
    notes=(
        "Every replica has a batch of its own, so the work grows with them. efficiency: the part of a step that is computation. "
        "communication: seconds in which collectives or messages run, hidden or not; of FSDP2: as a ratio to FSDP2's.",
        "sent MiB: of a rank in a step. start s: imports, connections, agreement on options and the broadcast of weights.",
        "ddp, fsdp2, ring: other engines, predicted with ring collectives that wait for no cycle.",
    ),
)
