"""How long training waits for a snapshot, and how much slower it runs meanwhile (the runs are in ``tests/faults``)."""

from benchmarks.suite import Suite
from hvd_ckpt.app.compare.runner.report import Column

snapshots = Suite(
    name="snapshots",
    title="Snapshot stall",
    help="Time how long a training pauses for a snapshot, beside torch.save and PyTorch Distributed Checkpoint.",
    engines=("blocking", "torch.save", "background", "dcp"),
    workloads={"gpt": ""},
    columns=(
        Column(
            "added ms", lambda row: row.over("added"), lambda seconds: f"{1000 * seconds:.0f}", key="added"
        ),
        Column("MB", lambda row: row.over("megabytes"), ".0f", key="megabytes"),
    ),
    against={"of blocking": "blocking"},
    np="1",
    rounds=7,
    quick={"rounds": 1},
    together=True,
    launched=False,
    worker="faults.stall:measure",
    notes=(
        "step ms: time that training waits for one snapshot. added: median time by which the steps until the snapshot is on the "
        "disk are longer than others, in sum. blocking, background: SnapshotWriter; dcp: async_save of PyTorch Distributed "
        "Checkpoint; torch.save is followed by fsync.",
    ),
)
