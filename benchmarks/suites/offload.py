"""Time a step and measure its memory where shards are in files.

They are in the folder of the report: give an --output on the disk that is to be used, on a machine that does nothing else.
"""

from benchmarks.case import figure
from benchmarks.suite import Suite
from hvd_ckpt.app.compare.runner.report import in_mib

offload = Suite(
    engines=("none", "optimizer", "parameters"),
    workloads=("linear",),
    columns=(figure("peak MiB", "peak_bytes", in_mib()), figure("after a step MiB", "held_bytes", in_mib())),
    against={"of none": "none"},
    sizes={"linear": {"layers": 16, "width": 2048, "batch": 256}},
    quick_sizes={"linear": {"layers": 2, "width": 64, "batch": 8}},
    np="1",
    rounds=6,
    warm_up=2,
    together=True,
    threads=1,
    measure="benchmarks.measures.offload:measure",
)
