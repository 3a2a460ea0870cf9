"""Runs that are killed, resumed and checked, kills within a save, and a long run (they are in ``tests/faults``)."""

from __future__ import annotations

from benchmarks.case import Case, Row
from benchmarks.suite import Suite
from hvd_ckpt.app.compare.runner.report import Column

KINDS = {
    "ranks": {},
    "stages": {"stages": 2},
    "parts": {"tensor": 2},
    "replicas": {"replicas": 4},
    "elastic": {"replicas": 4, "elastic": True},
}
"""Settings of ``hvd-ckpt train`` in killed runs."""


def keeps(case: Case) -> bool:
    """Saves and the soak have ranks of their own."""
    if case.engine != "kill":
        return case.workload == "ranks" and (case.np, case.controller) == (2, "gloo")
    divided = case.sizes.get("stages", 1) * case.sizes.get("tensor", 1)
    return case.np % divided == 0 and (
        case.workload != "elastic" or (case.np > 1 and case.controller == "gloo")
    )


def right(row: Row) -> str | None:
    """How many are right."""
    return f"{row.over('right_count')} of {row.over('count')}" if row.figures else None


faults = Suite(
    name="faults",
    title="Faults",
    help="""Kill training and saving at random moments, and check what is lost.

    kill: runs are killed, restarted and compared with an undisturbed run. save: a process is killed within its saves. soak: the
    processes of a long run are measured. Everything random follows from the seed: round i has seed + i, and --rounds 1 --set seed=S
    repeats it.
    """,
    engines=("kill", "save", "soak"),
    workloads=dict.fromkeys(KINDS, ""),
    chosen={"engines": "kill,save", "workloads": "ranks"},
    columns=(
        Column("right", right),
        Column("kills", lambda row: row.over("kills_count"), key="kills"),
        Column("while writing", lambda row: row.over("writing_count"), key="writing"),
    ),
    keeps=keeps,
    sizes={name: {"seed": 1, "saves": 10, "minutes": 30.0, **kind} for name, kind in KINDS.items()},
    np="2,4",
    controllers="gloo,mpi",
    rounds=20,
    quick={"np": "2", "controller": "gloo", "rounds": 1},
    timed=False,
    sound=lambda row, rows: row.over("right_count") == row.over("count"),
    launched=False,
    worker="faults.run:measure",
    notes=(
        "kill: right if weights, optimizer state, position in the data, each rank's random state and all logged losses are those "
        "of the undisturbed run on the same ranks and controller, bit for bit (with replicas, of one on one rank, but for random "
        "states); if no restart resumed from before a snapshot that had been in place; if every rank can read every "
        "snapshot in place after a kill; and if no process runs 30 s after the launcher has ended.",
        "save: right if the newest snapshot that loads is whole, has the content of its write, is of no earlier write than the "
        "last that had returned, and nothing in place is damaged. One kill in four is aimed at the end of a save that replaces a "
        "snapshot, the others come at any moment of a save.",
        "soak: right if descriptors and threads do not rise, and memory by less than 1 % of its mean.",
    ),
)
