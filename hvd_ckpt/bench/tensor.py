"""``hvd-ckpt bench tensor``: step time of a GPT in parts, beside PyTorch's ``parallelize_module`` of the same GPT over Gloo.

Both models live in the same processes and take turns. The time of a step is that of the slowest part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.bench.harness.jobs import RankJob, join_torch, run_rank
from hvd_ckpt.bench.harness.options import ONE_THREAD, BenchRun, bench_command
from hvd_ckpt.bench.harness.report import Table
from hvd_ckpt.bench.harness.settings import BenchSettings, setting
from hvd_ckpt.bench.harness.stats import alternating, quartiles, quartiles_of_ratios, slowest

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = {"vocabulary": 4096, "length": 128, "width": 256, "heads": 8, "layers": 4}
BATCH = 4
OURS, THEIRS = "hvd_ckpt", "PyTorch"
NOTES = (
    "step ms: forward and backward pass and a step of SGD; median over rounds, quartiles in brackets.",
    "of PyTorch: the step time as a ratio to PyTorch's in the same round. Below 1 is faster.",
    "sums: the share of a step that is spent in sums and gathers among the parts, waits for a slower part included.",
)


@dataclass(frozen=True)
class Settings(BenchSettings):
    """How many parts take how many steps."""

    parts: int = setting("Parts of a layer.", 2, flag="np", type=click.IntRange(2))
    rounds: int = setting("Rounds, in each of which both engines take steps.", 9)
    steps: int = setting("Steps of a round.", 3)


@dataclass(frozen=True)
class Job(RankJob):
    """Parts that take steps with both engines in turn."""

    worker = "hvd_ckpt.bench.tensor"
    settings: Settings


@dataclass
class RankResult:
    """For each engine the seconds of a step in each round; of ours also the share of sums."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {OURS: [], THEIRS: []})
    shares: list[float] = field(default_factory=list)


def parallelize(model: nn.Module) -> nn.Module:
    """The model by PyTorch's ``parallelize_module``. A part gets other rows of a fused weight, which takes as long."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parts = torch.distributed.get_world_size()
    plan: dict[str, Any] = {"embedding.tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["head.1"] = ColwiseParallel(output_layouts=Replicate())
    for name, module in model.named_modules():
        if name.endswith(".attention"):
            plan |= {f"{name}.project": ColwiseParallel(), f"{name}.output": RowwiseParallel()}
            module.heads //= parts
        elif name.endswith(".perceptron"):
            plan |= {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (parts,)), plan)


def step_of(split: Callable[[Any], Any]) -> Callable[[], None]:
    """A training step of a GPT that ``split`` has split."""
    import torch
    from torch.nn import functional

    from hvd_ckpt.app.models.gpt import gpt

    torch.manual_seed(0)
    model = split(gpt(**SIZES, tied=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randint(0, SIZES["vocabulary"], (2, BATCH, SIZES["length"]))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(2):
        step()
    return step


def measure(job: Job) -> RankResult:
    """Times steps of both engines in turn on one part."""
    import torch

    import hvd_ckpt as hc
    from hvd_ckpt.processes import parts

    hc.init(tensor=job.size)
    join_torch(job.folder, hc.tensor_rank(), job.size)
    steps, result = job.settings.steps, RankResult()
    ways = {OURS: step_of(hc.tensor_parallel), THEIRS: step_of(parallelize)}
    exchange, spent = parts.exchange, 0.0

    def timed(sent: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        nonlocal spent
        start = time.perf_counter()
        exchange(sent, rows)
        spent += time.perf_counter() - start

    # All sums and gathers of this library among parts call this one function of the module. PyTorch's do not.
    parts.exchange = timed
    for _, engine in alternating(list(ways), job.settings.rounds):
        parts.add(torch.zeros(1))  # all parts begin together
        start, spent = time.perf_counter(), 0.0
        for _ in range(steps):
            ways[engine]()
        took = time.perf_counter() - start
        result.seconds[engine].append(took / steps)
        if engine == OURS:
            result.shares.append(spent / took)
    return result


@bench_command("tensor", width=100, settings=Settings)
def tensor(run: BenchRun, settings: Settings) -> None:
    """Time steps of a GPT whose layers are split over parts, beside PyTorch's parallelize_module."""
    job = Job(run.jobs / "steps", settings.parts, settings)
    with run.progress(1) as progress:
        ranks = progress.job(f"{settings.parts} parts", job, RankResult, threads=1)
    table = Table(("engine", "step ms", f"of {THEIRS}", "sums"), left=("engine",))
    if ranks:
        seconds = {engine: slowest(rank.seconds[engine] for rank in ranks) for engine in (OURS, THEIRS)}
        ratios = quartiles_of_ratios(seconds[OURS], seconds[THEIRS])
        figures = {OURS: (f"{ratios:.2f}", f"{quartiles(ranks[0].shares):.2f}"), THEIRS: ("", "")}
        for engine, values in seconds.items():
            table.rows.append((engine, f"{quartiles(values).times(1e3):.1f}", *figures[engine]))
    facts = {**SIZES, "batch": BATCH, **ONE_THREAD}
    run.finish(run.report("Tensor parallelism: time of a step", [table], ranks, facts, notes=NOTES))


if __name__ == "__main__":
    run_rank(Job, measure)
