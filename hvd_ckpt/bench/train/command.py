"""``hvd-ckpt bench train``: options, progress, table, exit status.

Exit status 0 if both loops ran and did the same, 1 if not, 2 for a bad argument. A figure wanted that is not met is no error.
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
from hvd_ckpt.models import catalog

__all__ = ["train"]

WIDTH = 130  # of the table where the output is not a terminal


@click.command("train", cls=OneLineErrors)
@click.option("--models", default="bert-mini,gpt-tiny", show_default=True, help="What is trained.")
@click.option(
    "--accumulate",
    default="1,4",
    show_default=True,
    help="Numbers of micro-batches that a batch is split into.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Samples of a step on each rank."
)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    help="Timed rounds of each loop, in turn.",
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of a round.")
@job_options
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-train-<time>]"
)
def train(
    models: str,
    accumulate: str,
    batch: int,
    ranks: int,
    rounds: int,
    steps: int,
    controller: str,
    timeout: float,
    output: str | None,
) -> None:
    """Time what `hvd-ckpt train` adds to a step, beside a loop written by hand with the same calls.

    Both train the same model on the same batches in the same processes, in rounds that alternate, and must come to the same weights
    bit for bit. Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.train.job import Job, run_job
    from hvd_ckpt.bench.train.report import Case, Report

    names = split_names("--models", models, find=catalog.find)
    counts = [
        whole_number("--accumulate", text, "micro-batches")
        for text in split_names("--accumulate", accumulate)
    ]
    if max(counts) > batch:
        raise BadArgument(
            f"--accumulate: a batch of {batch} has fewer samples than {max(counts)}: give a larger --batch"
        )
    carrier = check_controller(controller)
    folder = output_folder(output, "bench-train")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    start = time.monotonic()
    report = Report(
        command=shlex.join(["hvd-ckpt", "bench", "train", *sys.argv[3:]]),
        facts=machine_facts(),
        settings={
            "models": list(names),
            "accumulate": counts,
            "batch": batch,
            "ranks": ranks,
            "rounds": rounds,
            "steps": steps,
            "controller": carrier,
        },
    )
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(names) * len(counts))
        for number, name in enumerate(names):
            for count in counts:
                progress.update(task, description=f"{name}, {count} micro-batches")
                job = Job(folder / "jobs" / f"{number}-{count}", ranks, name, count, batch, rounds, steps)
                report.cases.append(Case.of(name, count, steps, run_job(job, carrier, timeout)))
                report.seconds = time.monotonic() - start
                report.save(folder)  # a long run that is ended leaves what it has found
                progress.advance(task)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.sound else 1)
