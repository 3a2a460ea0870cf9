"""``python -m benchmarks replicas``: the options; the runs are in ``tests/same_bits`` of a clone of the repository.

Exit status 0 if every workload has one hash everywhere, 1 if one has several or a job failed, 2 for a bad argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import click

from benchmarks.checks import import_checks
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    check_replicas,
    controllers_of,
    numbers_of,
    quick_setting,
    ranks_setting,
    setting,
    timeout_setting,
)


@dataclass(frozen=True)
class ReplicaSettings(BenchSettings):
    """What is measured, and how often."""

    replicas: int = setting("Logical replicas of each run, a power of two.", 4)
    sizes: tuple[int, ...] = ranks_setting(
        "Numbers of ranks; powers of two up to --replicas.", "1,2,4", quick=None
    )
    controllers: tuple[str, ...] | None = setting(
        "Controllers that start the ranks.", note="those of this Horovod", type=controllers_of
    )
    workloads: tuple[int, ...] | None = setting(
        "Numbers of the workloads to train, from 1, such as 1,3.", note="all", type=numbers_of("a workload")
    )
    steps: int = setting("Steps of each run.", 6, quick=4)
    curves: int = setting(
        "Steps of further runs, of one GPT, whose losses are drawn beside those of stock Horovod; 0 for none.",
        60,
        quick=0,
        type=click.IntRange(0),
    )
    quick: bool = quick_setting("Two of the workloads.")
    timeout: float = timeout_setting(900)

    def check(self) -> None:
        check_replicas(self.replicas, self.sizes)


@bench_command(ReplicaSettings, width=170)
def replicas(run: BenchRun, settings: ReplicaSettings) -> None:
    """Train as logical replicas on several numbers of ranks, and compare what comes of it bit for bit.

    Each workload is trained to the end on every number of ranks, and once more from the middle of the run of another number. The
    table has one hash of all results of each run. A picture has the losses of a GPT on each number of ranks, relative to the
    smallest, with stock Horovod and as logical replicas.
    """
    import_checks("same_bits").run_replicas(run, settings)
