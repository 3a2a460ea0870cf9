"""``hvd-ckpt bench densenet``: options, progress, table, exit status.

Exit status 0 if every job ended and this library trained right, 1 if not, 2 for a bad argument. Neither a batch that does not
fit nor a figure wanted that is not met is an error.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time

import click

from hvd_ckpt.command_line import (
    BadArgument,
    OneLineErrors,
    check_controller,
    console_for_tables,
    job_options,
    output_folder,
    progress_bar,
    split_names,
    whole_number,
)
from hvd_ckpt.machine import machine_facts
from hvd_ckpt.models.sizes import DENSENETS
from hvd_ckpt.planning.budget import parse_budget

__all__ = ["densenet"]

RANKS = (
    "1",
    "2",
)  # with more, sums depend on where a gradient lies in its bucket, and no two contenders need agree bit for bit
SMALLEST = {False: 4, True: 32}  # pixels, by whether the stem is that of large images
WIDTH = 130  # of the table where the output is not a terminal


@click.command("densenet", cls=OneLineErrors)
@click.option("--ranks", default=",".join(RANKS), show_default=True, help="Numbers of ranks: 1, 2 or both.")
@click.option(
    "--batches", default="16,64,256", show_default=True, help="Images of a step, over all ranks of a job."
)
@click.option(
    "--budgets",
    "--budget",
    default="0.57x,0.4x",
    show_default=True,
    help="Of our plans, as hvd_ckpt.plan takes them.",
)
@click.option(
    "--plan-images",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Images with which a rank plans for budgets like 0.57x, which peaks of all batches share; bytes need the whole batch.",
)
@click.option(
    "--depth",
    type=click.Choice([str(depth) for depth in DENSENETS]),
    default="100",
    show_default=True,
    help="Of the DenseNet.",
)
@click.option(
    "--pixels", type=click.IntRange(1), default=32, show_default=True, help="Height and width of the images."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Timed steps of each, in turn."
)
@job_options
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-densenet-<time>]"
)
def densenet(
    ranks: str,
    batches: str,
    budgets: str,
    plan_images: int,
    depth: str,
    pixels: int,
    rounds: int,
    controller: str,
    timeout: float,
    output: str | None,
) -> None:
    """Train a DenseNet with everything kept, with PyTorch's checkpoint and with this library: memory, time, correctness.

    The table of the pytorch-checkpoint project, anew. All train the same batches in one process per rank, step by step in turn, and
    batches that do not fit the memory are left out. Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.densenet.case import Case
    from hvd_ckpt.bench.densenet.job import Job
    from hvd_ckpt.bench.densenet.launch import run_job
    from hvd_ckpt.bench.densenet.report import Report

    sizes = [int(name) for name in split_names("--ranks", ranks, RANKS)]
    counts = [whole_number("--batches", text, "images") for text in split_names("--batches", batches)]
    wishes = split_names("--budgets", budgets, find=parse_budget)
    for count in counts:
        if count % max(sizes):
            raise BadArgument(
                f"--batches: {count} images cannot be shared by {max(sizes)} ranks: give even numbers"
            )
    if pixels < (least := SMALLEST[DENSENETS[int(depth)].large_images]):
        raise BadArgument(f"--pixels: a DenseNet of depth {depth} needs at least {least}, got {pixels}")
    carrier = check_controller(controller)
    folder = output_folder(output, "bench-densenet")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    start = time.monotonic()
    report = Report(
        command=shlex.join(["hvd-ckpt", "bench", "densenet", *sys.argv[3:]]),
        facts=machine_facts(),
        settings={
            "ranks": sizes,
            "batches": counts,
            "budgets": list(wishes),
            "plan_images": plan_images,
            "depth": int(depth),
            "pixels": pixels,
            "rounds": rounds,
            "controller": carrier,
        },
    )
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(sizes) * len(counts))
        for size in sizes:
            for count in counts:
                progress.update(task, description=f"np={size}, batch {count}")
                job = Job(
                    folder / "jobs" / f"np{size}-batch{count}",
                    size,
                    count,
                    int(depth),
                    pixels,
                    wishes,
                    plan_images,
                    rounds,
                )
                report.cases.append(Case.of(size, count, run_job(job, carrier, timeout)))
                report.seconds = time.monotonic() - start
                report.save(folder)  # a long run that is ended leaves what it has found
                progress.advance(task)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.sound else 1)
