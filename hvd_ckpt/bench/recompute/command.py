"""``hvd-ckpt bench recompute``: options, progress, tables, exit status.

Exit status 0 if keeping everything and all of this library's plans ran with the same results, 1 if not, 2 for a bad argument.
A peer that does not run is a row of its own, with the reason below the table.
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING

import click

from hvd_ckpt.command_line import (
    OneLineErrors,
    check_device,
    console_for_tables,
    output_folder,
    progress_bar,
    split_names,
)
from hvd_ckpt.machine import machine_facts

if TYPE_CHECKING:
    import torch

__all__ = ["recompute"]

WORKLOADS = "gpt,bert,densenet,lstm"
CONTENDERS = "keep,sequential,blocks,selective,torch_remat,ckptplan,rockmate,ours"

BUDGETS = "0.7x,0.5x,0.3x,0.15x,min"
ROUNDS, QUICK_ROUNDS = 15, 3
WIDTH = 150  # of the tables where the output is not a terminal


@click.command("recompute", cls=OneLineErrors)
@click.option("--workloads", default=WORKLOADS, show_default=True, help="What is trained.")
@click.option(
    "--contenders",
    default=CONTENDERS,
    show_default=True,
    help="Who runs it, beside keeping everything.",
)
@click.option(
    "--budgets",
    default=BUDGETS,
    show_default=True,
    help="Of our plans, as hvd_ckpt.plan takes them, or 'fastest'.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=None,
    help=f"Timed steps of each, in turn.  [default: {ROUNDS}; with --quick {QUICK_ROUNDS}]",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N.")
@click.option("--compiled", is_flag=True, help="Then the same under torch.compile; compiling takes minutes.")
@click.option(
    "--quick", is_flag=True, help="Tiny models and few rounds: whether it works, not how fast it is."
)
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-recompute-<time>]"
)
def recompute(
    workloads: str,
    contenders: str,
    budgets: str,
    rounds: int | None,
    device: str,
    compiled: bool,
    quick: bool,
    output: str | None,
) -> None:
    """Time a step and measure its peak memory with this library's plans and with everything else that recomputes.

    Says for each contender its peak and its time, and for the plan that was given just as much memory the same. All of it
    runs in one process, step by step in turn. Run it on a machine that does nothing else.
    """
    import torch

    from hvd_ckpt.bench.recompute.case import run_case
    from hvd_ckpt.bench.recompute.compiled import COMPILED
    from hvd_ckpt.bench.recompute.contenders import FAMILIES
    from hvd_ckpt.bench.recompute.report import Report
    from hvd_ckpt.bench.recompute.workloads import NAMES, workload

    names = split_names("--workloads", workloads, NAMES)
    families = split_names("--contenders", contenders, FAMILIES)
    wishes = split_names("--budgets", budgets)
    place = check_device(device)
    count = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    sizes = "quick" if quick else place.type
    folder = output_folder(output, "bench-recompute")
    start = time.monotonic()
    report = Report(
        command=shlex.join(["hvd-ckpt", "bench", "recompute", *sys.argv[3:]]),
        facts={**machine_facts(), "device": _describe(place), "threads": str(torch.get_num_threads())},
        settings={
            "workloads": names,
            "contenders": families,
            "budgets": wishes,
            "rounds": count,
            "sizes": sizes,
            "device": str(place),
        },
        cases=[],
    )
    plan = [(name, form) for name in names for form in ((False, True) if compiled else (False,))]
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(plan))
        for name, form in plan:

            def show(what: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {what}")

            chosen = (COMPILED, *families) if form else families
            report.cases.append(run_case(workload(name, sizes), place, chosen, wishes, count, form, show))
            report.seconds = time.monotonic() - start
            report.save(folder)  # a long run that is ended leaves what it has found
            progress.advance(task)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.sound else 1)


def _describe(device: torch.device) -> str:
    import torch

    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
