"""``hvd-ckpt bench reduce``: options, progress, table, exit status.

Exit status 0 if every engine was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from hvd_ckpt.command_line import (
    OneLineErrors,
    check_controller,
    console_for_tables,
    output_folder,
    progress_bar,
    split_names,
    whole_number,
)
from hvd_ckpt.machine import machine_facts

if TYPE_CHECKING:
    from hvd_ckpt.bench.reduce import Case, Plan

__all__ = ["bench"]

ENGINES = "hvd_ckpt,horovod,ddp"
WORKLOADS = "densenet,transformer"
PAIRS, QUICK_PAIRS = 5, 3
WIDTH = 120  # of the table where the output is not a terminal


class _Bench(click.Group):
    """The group, with the commands that have rooms of their own; each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "densenet", "faults", "recompute", "shard", "train"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "densenet":
            from hvd_ckpt.bench.densenet.command import densenet

            return densenet
        if name == "faults":
            from hvd_ckpt.bench.faults.command import faults

            return faults
        if name == "recompute":
            from hvd_ckpt.bench.recompute.command import recompute

            return recompute
        if name == "shard":
            from hvd_ckpt.bench.shard.command import shard

            return shard
        if name == "train":
            from hvd_ckpt.bench.train.command import train

            return train
        return super().get_command(ctx, name)


@click.group("bench", cls=_Bench)
def bench() -> None:
    """Measure how fast things are, beside other engines."""


@bench.command("reduce", cls=OneLineErrors)
@click.option("--np", "sizes", default=None, help="Numbers of ranks.  [default: 2,4; with --quick 2]")
@click.option(
    "--controller", "controllers", default="gloo,mpi", show_default=True, help="What starts the ranks."
)
@click.option("--workloads", default=WORKLOADS, show_default=True, help="What is trained.")
@click.option("--engines", default=ENGINES, show_default=True, help="Engines, or module:Class of your own.")
@click.option(
    "--pairs",
    type=click.IntRange(1),
    default=None,
    help=f"Jobs per engine, alternating.  [default: {PAIRS}; with --quick {QUICK_PAIRS}]",
)
@click.option(
    "--steps", type=click.IntRange(1), default=None, help="Timed steps per job.  [default: by workload]"
)
@click.option("--quick", is_flag=True, help="Two ranks and fewer pairs.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds for one job."
)
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-reduce-<time>]"
)
def reduce(
    sizes: str | None,
    controllers: str,
    workloads: str,
    engines: str,
    pairs: int | None,
    steps: int | None,
    quick: bool,
    timeout: float,
    output: str | None,
) -> None:
    """Time training steps with this library, stock Horovod and DDP, in whole jobs that alternate.

    Gradients are many and small (a DenseNet) or few and large (a transformer). Says for each engine the time of a step, its
    ratio to stock Horovod's and DDP's in the same pair of jobs, and the bytes held for gradients. Run it on a machine
    that does nothing else.
    """
    from hvd_ckpt.bench.compare.engines import find_engine
    from hvd_ckpt.bench.reduce import Plan
    from hvd_ckpt.bench.report import Report
    from hvd_ckpt.bench.workloads import WORKLOADS as KNOWN

    chosen = split_names("--engines", engines, find=find_engine)
    plan = Plan(
        engines=chosen,
        sizes=tuple(
            whole_number("--np", text, "ranks")
            for text in split_names("--np", sizes or ("2" if quick else "2,4"))
        ),
        controllers=tuple(
            check_controller(name) for name in split_names("--controller", controllers, ("gloo", "mpi"))
        ),
        workloads=split_names("--workloads", workloads, KNOWN),
        pairs=pairs or (QUICK_PAIRS if quick else PAIRS),
        steps=steps,
        timeout=timeout,
        folder=(folder := output_folder(output, "bench-reduce")) / "jobs",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    start = time.monotonic()
    cases = _run(plan)
    command = shlex.join(["hvd-ckpt", "bench", "reduce", *sys.argv[3:]])
    report = Report(command, plan, machine_facts(), cases, time.monotonic() - start)
    report.save(folder)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.complete else 1)


def _run(plan: Plan) -> list[Case]:
    """Run the plan with a live line of progress."""
    with progress_bar() as progress:
        task = progress.add_task("starting", total=plan.jobs)
        started = 0

        def show(what: str) -> None:
            nonlocal started
            progress.update(task, description=what, completed=started)
            started += 1

        return plan.run(show)
