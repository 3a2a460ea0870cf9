"""``python -m benchmarks faults``: the options; the runs are in ``tests/faults`` of a clone of the repository.

Exit status 0 if everything held, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import click

from benchmarks.checks import import_checks
from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.app.compare.runner.options import BenchRun, bench_command
from hvd_ckpt.app.compare.runner.settings import (
    BenchSettings,
    check_replicas,
    in_words,
    ranks_setting,
    setting,
    timeout_setting,
)


@dataclass(frozen=True)
class FaultSettings(BenchSettings):
    """The parts that are run, how often, and on what."""

    runs: int = setting("Runs that are killed.", 20, type=click.IntRange(0))
    saves: int = setting("Kills within a save.", 200, type=click.IntRange(0))
    minutes: float = setting("Minutes of the soak.", 0, note="none", flag="soak", type=click.FloatRange(0))
    stall_rounds: int = setting("Rounds of timed snapshots.", 0, note="none", type=click.IntRange(0))
    sizes: tuple[int, ...] = ranks_setting("Numbers of ranks of the runs.", quick=None)
    stages: int = setting("Pipeline stages of the runs.", 1)
    tensor: int = setting("Parts of a layer in the runs.", 1)
    replicas: int | None = setting(
        "Logical replicas of the runs: each launch is on another of the numbers of ranks, and all runs end in the same bits.",
        type=click.IntRange(1),
    )
    elastic: bool = setting("Jobs of Horovod Elastic on two names of this machine; needs --replicas.", False)
    controllers: str = setting("What starts the ranks: gloo,mpi.", "auto", flag="controller")
    seed: int | None = setting("Of the first run.", note="1, or the next of --add", type=click.IntRange(0))
    add: str | None = setting("Add the results to those in a file of JSON lines.", metavar="FILE")
    timeout: float = timeout_setting(300, "launch")

    def check(self) -> None:
        given = f"--np {in_words(self.sizes)}"
        if any(size % (self.stages * self.tensor) for size in self.sizes):
            raise BadArgument(
                f"--stages {self.stages}, --tensor {self.tensor}: {given} has other numbers than multiples of their product"
            )
        if self.replicas is not None:
            check_replicas(self.replicas, self.sizes)
        enough = self.replicas is not None and min(self.sizes) > 1 and self.controllers in ("auto", "gloo")
        if self.elastic and not enough:
            raise BadArgument(
                f"--elastic: give --replicas, 2 or more ranks ({given}), and no controller but gloo"
            )


@bench_command(FaultSettings, width=170)
def faults(run: BenchRun, settings: FaultSettings) -> None:
    """Kill training and saving at random moments, and check what is lost.

    Runs are killed, restarted and compared with an undisturbed run; a process is killed within its saves; the processes of a long
    run are measured. Everything random follows from the seed: run i has the seed S + i, and --runs 1 --seed S+i repeats it.
    """
    import_checks("faults").run_faults(run, settings)
