"""Time how long a training pauses for a snapshot, beside torch.save and PyTorch Distributed Checkpoint."""

from benchmarks.case import figure
from benchmarks.suite import Suite

snapshots = Suite(
    engines=("blocking", "torch.save", "background", "dcp"),
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
    worker="benchmarks.stalls:measure",
    notes=(
        "step ms: time that training waits for one snapshot. added: median time by which the steps until the snapshot is on the "
        "disk are longer than others, in sum. blocking, background: SnapshotWriter; dcp: async_save of PyTorch Distributed "
        "Checkpoint; torch.save is followed by fsync.",
    ),
)
