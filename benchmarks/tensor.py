"""``python -m benchmarks tensor``: step time of a GPT in parts, beside PyTorch's ``parallelize_module`` of the same GPT over Gloo.

Both models live in the same processes and take turns. The time of a step is that of the slowest part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hvd_ckpt.app.compare.runner.cases import Case, Column, quartiles_in_ms, table_of
from hvd_ckpt.app.compare.runner.jobs import RankJob, join_torch
from hvd_ckpt.app.compare.runner.options import ONE_THREAD, BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import BenchSettings, setting
from hvd_ckpt.app.compare.runner.stats import alternating, quartiles, slowest

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

    worker = "benchmarks.tensor:measure"
    settings: Settings


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


def measure(job: Job) -> dict[str, Any]:
    """Times steps of both engines in turn on one part: ``seconds`` of a step in each round, and ``shares`` of our sums in them."""
    import torch

    import hvd_ckpt as hc
    from hvd_ckpt.processes import parts

    hc.init(tensor=job.size)
    join_torch(job.folder)
    steps, shares = job.settings.steps, []
    ways = {OURS: step_of(hc.tensor_parallel), THEIRS: step_of(parallelize)}
    exchange, spent = parts.exchange, 0.0

    def timed(sent: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        nonlocal spent
        start = time.perf_counter()
        exchange(sent, rows)
        spent += time.perf_counter() - start

    # All sums and gathers of this library among parts call this one function of the module. PyTorch's do not.
    parts.exchange = timed
    seconds: dict[str, list[float]] = {engine: [] for engine in ways}
    for _, engine in alternating(list(ways), job.settings.rounds):
        parts.add(torch.zeros(1))  # all parts begin together
        start, spent = time.perf_counter(), 0.0
        for _ in range(steps):
            ways[engine]()
        took = time.perf_counter() - start
        seconds[engine].append(took / steps)
        if engine == OURS:
            shares.append(spent / took)
    return {"seconds": seconds, "shares": shares}


@bench_command(Settings, width=100)
def tensor(run: BenchRun, settings: Settings) -> None:
    """Time steps of a GPT whose layers are split over parts, beside PyTorch's parallelize_module."""
    job = Job(run.jobs / "steps", settings.parts, settings)
    with run.progress(1) as progress:
        ranks = progress.job(f"{settings.parts} parts", job, dict[str, Any], threads=1)
    cases = [
        Case(engine, {}, slowest(rank["seconds"][engine] for rank in ranks))
        for engine in (OURS, THEIRS)
        if ranks
    ]
    columns = [
        Column("engine", lambda case: case.engine, left=True),
        Column("step ms", lambda case: case.step, quartiles_in_ms(".1f")),
        Column(
            f"of {THEIRS}", lambda case: case.ratio(cases[1]) if case is cases[0] else None, ".2f", missing=""
        ),
        Column(
            "sums",
            lambda case: quartiles(ranks[0]["shares"]) if case is cases[0] else None,
            ".2f",
            missing="",
        ),
    ]
    facts = {**SIZES, "batch": BATCH, **ONE_THREAD}
    run.finish(
        run.report(
            "Tensor parallelism: time of a step", [table_of(columns, cases)], ranks, facts, notes=NOTES
        )
    )
