"""Train a GPT as logical replicas and with stock Horovod on several numbers of ranks, and compare the losses.

Both draw the same samples of a text for each step, and divide them among however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.pictures import Lines, Point
from benchmarks.suite import Axis, Suite
from hvd_ckpt.app.cli.command_line import BadArgument

SIZES = {"batch": 4, "length": 32, "width": 32, "heads": 2, "layers": 2, "vocabulary": 320, "dropout": 0.1}


def keeps(case: Case) -> bool:
    """One rank is the same over every controller."""
    replicas = int(case.at["replicas"])
    if case.np & (case.np - 1) or case.np > replicas:
        raise BadArgument(f"--np {case.np}: give powers of two up to --replicas {replicas}")
    return case.np > 1 or case.controller == "gloo"


def options(case: Case) -> Mapping[str, Any]:
    """A micro-batch for each replica; a rank of stock Horovod has them one after the other."""
    count = int(case.at["replicas"])
    return {"passes": count // case.np} | ({"replicas": count} if case.engine == "replicas" else {})


def found(row: Row) -> list[float] | None:
    """The losses of a row, which are the same on all ranks."""
    losses: list[float] | None = row.over("losses", lambda ranks: ranks[0])
    return losses


def alike(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows of an engine on all numbers of ranks."""
    return [other for other in rows if (other.case.engine, other.case.at) == (row.case.engine, row.case.at)]


def same(row: Row, rows: Sequence[Row]) -> str | None:
    """Whether all losses are, bit for bit, those of the engine on the first number of ranks."""
    first = next((found(other) for other in alike(row, rows)), None)
    return None if found(row) is None or first is None else "yes" if found(row) == first else "no"


def points(row: Row, rows: Sequence[Row]) -> Iterator[Point]:
    """For each engine, how far the losses are from those on the smallest number of ranks."""
    own = {other.case.np: found(other) for other in alike(row, rows)}
    sizes = sorted(size for size, losses in own.items() if losses)
    # Lines get thinner, so that several of the same values can be told from one.
    style = {"linewidth": 1.5 * sum(size >= row.case.np for size in sizes)}
    losses = zip(found(row) or (), own[sizes[0]] or ()) if sizes else ()
    for step, (loss, other) in enumerate(losses, start=1):
        yield Point(row.case.engine, f"np={row.case.np}, {row.case.controller}", step, loss - other, style)


replicas = Suite(
    engines=("replicas", "horovod"),
    workloads=("text",),
    columns=("losses",),
    against={"same losses": same},
    axes={"replicas": Axis("Logical replicas.", ("1", "2", "4", "8", "16"), "4")},
    keeps=keeps,
    options=options,
    sizes={"text": SIZES},
    np="4,1,2",  # neighbours differ most
    controllers="gloo,mpi",
    rounds=1,
    steps=60,
    warm_up=0,
    quick={"controller": "gloo", "steps": 4},
    optimizer="AdamW",
    lr=2e-3,
    threads=1,
    sound=lambda row, rows: row.case.engine == "horovod" or same(row, rows) != "no",
    lines=Lines(points, "step", "loss, relative to the fewest ranks"),
)
