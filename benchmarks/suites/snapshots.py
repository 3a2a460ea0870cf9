"""Time how long a training pauses for a snapshot, beside PyTorch Distributed Checkpoint.

Ways of writing the same state alternate, and each begins with training steps that are not counted. What a snapshot adds to the
steps until it is on the disk is relative to steps of the same round while nothing is written.
"""

from benchmarks.case import figure
from benchmarks.suite import Suite

WRITERS = ("blocking", "background")


snapshots = Suite(
    engines=(*WRITERS, "dcp"),
    workloads=("gpt",),
    columns=(
        figure("added ms", "added", lambda seconds: f"{1000 * seconds:.0f}"),
        figure("MB", "megabytes", ".0f"),
    ),
    against={"of blocking": "blocking"},
    np="1",
    rounds=7,
    quick={"rounds": 1},
    together=True,
    launched=False,
    measure="benchmarks.measures.snapshots:measure",
    notes=(
        "step ms: time that training waits for one snapshot. added: median time by which the steps until the snapshot is on the "
        "disk are longer than others, in sum. blocking, background: SnapshotWriter; dcp: async_save of PyTorch Distributed "
        "Checkpoint.",
    ),
)
