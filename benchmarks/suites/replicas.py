"""Train a GPT as logical replicas and with stock Horovod on several numbers of ranks, and compare the losses.

Both draw the same samples for each step, and divide them among however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.case import Case, Row, figure
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Suite
from hvd_ckpt.app.cli.command_line import BadArgument


def keeps(case: Case) -> bool:
    """One rank is the same over every controller."""
    replicas = case.sizes["replicas"]
    if replicas & (replicas - 1) or case.np & (case.np - 1) or case.np > replicas:
        raise BadArgument(f"--np {case.np}: give powers of two up to replicas={replicas}, a power of two")
    return case.np > 1 or case.controller == "gloo"


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
    measure="benchmarks.measures.replicas:measure",
    lines=Lines(points, "step", "loss, relative to the fewest ranks"),
)
