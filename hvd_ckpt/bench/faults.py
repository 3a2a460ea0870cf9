"""``hvd-ckpt bench faults``: the options; the runs are in ``tests/faults`` of a clone of the repository.

Exit status 0 if everything held, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import BadArgument
from hvd_ckpt.bench.harness.options import BenchRun, bench_command, timeout_option

TESTS = Path(__file__).resolve().parents[2] / "tests"


@bench_command("faults", width=170)
@click.option("--runs", type=click.IntRange(0), default=20, show_default=True, help="Runs that are killed.")
@click.option("--saves", type=click.IntRange(0), default=200, show_default=True, help="Kills within a save.")
@click.option(
    "--soak", "minutes", type=click.FloatRange(0), default=0, help="Minutes of the soak.  [default: none]"
)
@click.option(
    "--stall-rounds", type=click.IntRange(0), default=0, help="Rounds of timed snapshots.  [default: none]"
)
@click.option("--np", "sizes", default="2,4", show_default=True, help="Numbers of ranks of the runs.")
@click.option(
    "--stages", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages of the runs."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Logical replicas of the runs: each launch is on another of the numbers of ranks, and all runs end in the same bits.",
)
@click.option(
    "--elastic", is_flag=True, help="Jobs of Horovod Elastic on two names of this machine; needs --replicas."
)
@click.option(
    "--controller", "controllers", default="auto", show_default=True, help="What starts the ranks: gloo,mpi."
)
@click.option("--seed", type=click.IntRange(0), help="Of the first run.  [default: 1, or the next of --add]")
@click.option("--add", metavar="FILE", help="Add the results to those in a file of JSON lines.")
@timeout_option(300, "launch")
def faults(run: BenchRun, **options: Any) -> None:
    """Kill training and saving at random moments, and check what is lost.

    Runs are killed, restarted and compared with an undisturbed run; a process is killed within its saves; the processes of a long
    run are measured. Everything random follows from the seed: run i has the seed S + i, and --runs 1 --seed S+i repeats it.
    """
    if not (TESTS / "faults").is_dir():
        raise BadArgument(
            f"bench faults runs {TESTS / 'faults'}, which is missing: use a clone of the repository"
        )
    sys.path.append(str(TESTS))
    import_module("faults.run").run_faults(run, options)
