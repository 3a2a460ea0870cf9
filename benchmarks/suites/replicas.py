"""Train a GPT as logical replicas and with stock Horovod on several numbers of ranks, and compare the losses.

Both draw the same samples for each step, and divide them among however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import hvd_ckpt as hc
from benchmarks.case import Case, Found, Row, figure
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.training.build import assemble
from hvd_ckpt.app.training.config import Config
from hvd_ckpt.data.sampler import DistributedSampler

BATCH = 4  # samples of a replica
LEARNING_RATE = 2e-3
SEED = 3


def keeps(case: Case) -> bool:
    """One rank is the same over every controller."""
    replicas = case.sizes["replicas"]
    if replicas & (replicas - 1) or case.np & (case.np - 1) or case.np > replicas:
        raise BadArgument(f"--np {case.np}: give powers of two up to replicas={replicas}, a power of two")
    return case.np > 1 or case.controller == "gloo"


def losses_of(case: Case) -> Found:
    """Trains on one rank; the mean loss of each step, over all samples. A rank of stock Horovod computes its part at once."""
    import horovod.torch as hvd

    options = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
    parts = assemble(Config("gpt-tiny", model_options=options, sequence_length=32, seed=SEED))
    model, replicas, sampler = parts.model, case.sizes["replicas"], DistributedSampler(parts.train, seed=SEED)
    stock, count = case.engine == "horovod", BATCH * replicas
    library: Any = hvd if stock else hc
    library.init()
    optimizer = library.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        named_parameters=model.named_parameters(),
        **({} if stock else {"model": model, "replicas": replicas}),
    )
    library.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(SEED + hvd.rank())

    def run(step: int, number: int, of: int) -> Tensor:
        """The forward and backward pass of one of the parts of a step's samples; its loss."""
        batch = parts.train.batch(*sampler.part(step * count, count, number, of))
        loss = parts.objective.loss(model(*batch.inputs, **batch.shared), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    means = []
    for step in range(case.sizes["steps"]):
        optimizer.zero_grad()
        losses = [run(step, hvd.rank(), hvd.size())] if stock else []
        for replica in () if stock else optimizer.local_replicas():
            with replica:
                losses.append(run(step, replica.index, replicas))
        optimizer.step()
        means.append(float(hvd.allreduce(losses[0]) if stock else optimizer.replicas.mean(losses)))
    return {"losses": means}


def found(row: Row) -> list[float] | None:
    """The losses of a row, which are the same on all ranks."""
    losses: list[float] | None = row.over("losses", lambda ranks: ranks[0])
    return losses


def same(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether all losses are, bit for bit, those of the engine on the first number of ranks."""
    first = next((found(other) for other in rows if other.case.engine == row.case.engine), None)
    return None if found(row) is None or first is None else "yes" if found(row) == first else "no"


def points(row: Row, rows: Sequence[Row]) -> Iterator[Point]:
    """For each engine, how far the losses are from those on the smallest number of ranks."""
    own = {other.case.np: found(other) for other in rows if other.case.engine == row.case.engine}
    sizes = sorted(size for size, losses in own.items() if losses)
    # Lines get thinner, so that several of the same values can be told from one.
    style = {"linewidth": 1.5 * sum(size >= row.case.np for size in sizes)}
    losses = zip(found(row) or (), own[sizes[0]] or ()) if sizes else ()
    for step, (loss, other) in enumerate(losses, start=1):
        yield Point(row.case.engine, f"np={row.case.np}, {row.case.controller}", step, loss - other, style)


replicas = Suite(
    engines=("replicas", "horovod"),
    workloads=("gpt",),
    columns=(figure("last loss", "losses", ".6f", over=lambda ranks: ranks[0][-1]),),
    against={"same losses": same},
    keeps=keeps,
    sizes={"gpt": {"replicas": 4, "steps": 60}},
    quick_sizes={"gpt": {"replicas": 4, "steps": 4}},
    np="4,1,2",  # neighbours differ most
    controllers="gloo,mpi",
    rounds=1,
    quick={"controller": "gloo"},
    threads=1,
    sound=lambda row, rows: row.case.engine == "horovod" or same(row, rows) != "no",
    measure=lambda job: [losses_of(case) for case in job.cases],
    lines=Lines(points, "step", "loss, relative to the fewest ranks"),
)
