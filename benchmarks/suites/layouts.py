"""Train with every layout that fits a memory, and compare the one that `hvd-ckpt layout` chooses with the fastest.

Memories lie between what the leanest layout needs and what all layouts have at most. With --link, the ranks are on hosts with
slow links, as root on Linux. Run it on a machine that does nothing else.
"""

from benchmarks.case import figure
from benchmarks.suite import Axis, Suite
from benchmarks.suites.scale_on_hosts import hosts

# Of the way from the least that layouts need to the most:
MEMORIES = {"roomy": 1.05, "half": 0.5, "floor": 0.08}

layouts = Suite(
    engines=("layout",),
    workloads=("gpt", "bert", "densenet"),
    columns=(
        figure("MiB", "memory_bytes", lambda value: f"{value / 2**20:.0f}"),
        figure("layouts", "layouts"),
        figure("chosen", "chosen"),
        figure("best", "best"),
        figure("of best", "of_best", ".2f"),
        figure("predicted", "of_predicted", ".2f"),
        figure("of memory", "of_memory", ".2f"),
        figure("too large", "too_large"),
        figure("choosing s", "choosing", ".0f"),
    ),
    axes={
        "memory": Axis("Of each rank.", tuple(MEMORIES)),
        "link": Axis("Mbit/s of a host.", ("none", "1000", "100"), "none"),
    },
    sizes={
        "gpt": {"model": "gpt-tiny", "batch": 16, "sequence_length": 64},
        "bert": {"model": "bert-tiny", "batch": 16, "sequence_length": 64},
        "densenet": {"model": "densenet-22", "batch": 32, "pixels": 16},
    },
    quick_sizes={
        name: {"model": "gpt-tiny", "batch": 2, "sequence_length": 8} for name in ("gpt", "bert", "densenet")
    },
    controllers="gloo,mpi",
    quick={"np": "2", "controller": "gloo", "workloads": "gpt", "memory": "floor"},
    rounds=1,
    together=True,
    within=hosts,
    measure="benchmarks.measures.layouts:measure",
    notes=(
        "of best: seconds of a step of the chosen layout as a ratio to those of the fastest, each the least of several runs in "
        "turn. predicted: the same of the layout that is fastest by prediction, without trials. of memory: its measured peak as a "
        "ratio to the memory.",
        "too large: of the layouts that need least beyond the memory by the estimate, those whose measured peak is beyond it. "
        "choosing s: of `hvd-ckpt layout`.",
    ),
)
