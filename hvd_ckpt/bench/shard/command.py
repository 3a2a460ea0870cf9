"""``hvd-ckpt bench shard``: options, progress, tables, exit status.

Exit status 0 if this library did all that it was asked for, 1 if not, 2 for a bad argument. With ``--check`` it
is 1, too, if a figure that is wanted is not met.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_ckpt.bench.shard.contenders import ENGINES, OURS, Contender, contenders
from hvd_ckpt.command_line import (
    BadArgument,
    OneLineErrors,
    check_controller,
    console_for_tables,
    job_options,
    output_folder,
    progress_bar,
    split_names,
)
from hvd_ckpt.json_file import write_json, write_text
from hvd_ckpt.machine import machine_facts

if TYPE_CHECKING:
    from hvd_ckpt.bench.shard.report import Report
    from hvd_ckpt.bench.shard.results import Result, Results

__all__ = ["shard"]

WIDTH = 200  # of the tables where the output is not a terminal
PEERS = tuple(name for name in ENGINES if name != OURS)
NOBODY = "none"
RANKS, QUICK_RANKS = 4, 2


@dataclass(frozen=True)
class Scale:
    """How much is done: ``passes`` are micro-batches of a step, ``rounds`` timed steps, ``steps`` those of a run in one format."""

    width: int
    layers: int
    heads: int
    length: int
    passes: int
    bucket_mb: float
    rounds: int
    steps: int


FULL = Scale(256, 6, 8, 128, 4, 4.0, 5, 300)
QUICK = Scale(64, 2, 2, 32, 2, 0.25, 2, 10)
FOR_WIRE = Scale(128, 4, 4, 64, 1, 1.0, 0, 300)


@click.command("shard", cls=OneLineErrors)
@click.option(
    "--np",
    "ranks",
    type=click.IntRange(1),
    default=None,
    help=f"Number of ranks.  [default: {RANKS}; with --quick {QUICK_RANKS}]",
)
@click.option(
    "--stages",
    default="0,1,2,3",
    show_default=True,
    help="What is split: 1 optimizer state, 2 gradients, 3 parameters.",
)
@click.option("--peers", default=",".join(PEERS), show_default=True, help=f"Beside whom, or {NOBODY}.")
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    default=None,
    help=f"Micro-batches of a step.  [default: {FULL.passes}; with --quick {QUICK.passes}]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=None,
    help=f"Timed steps of each.  [default: {FULL.rounds}; with --quick {QUICK.rounds}]",
)
@click.option(
    "--text",
    metavar="FILE",
    default=None,
    help="What is learned.  [default: the source text of Python's library]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="A tiny model, and everything in one job: shows that it runs, measures little.",
)
@click.option(
    "--wire",
    is_flag=True,
    help="Train with each format on the wire instead, and compare losses, errors and bytes.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=None,
    help=f"With --wire: of each run.  [default: {FOR_WIRE.steps}; with --quick {QUICK.steps}]",
)
@click.option("--check", is_flag=True, help="Exit status 1 if a figure that is wanted is not met.")
@click.option(
    "--chart",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="For the picture, beside the report's own.",
)
@job_options
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-shard-<time>]"
)
def shard(
    ranks: int | None,
    stages: str,
    peers: str,
    accumulate: int | None,
    rounds: int | None,
    text: str | None,
    quick: bool,
    wire: bool,
    steps: int | None,
    check: bool,
    chart: Path | None,
    controller: str,
    timeout: float,
    output: str | None,
) -> None:
    """Measure what splitting a model over the ranks saves and costs, beside PyTorch's and DeepSpeed's.

    A GPT-lite is trained at each stage, with and without recomputation: time of a step, memory of each rank by kind, bytes sent.
    Run it on a machine that does nothing else.
    """
    from hvd_ckpt.bench.shard.model import Samples

    size = ranks or (QUICK_RANKS if quick else RANKS)
    chosen = [int(name) for name in split_names("--stages", stages, [str(stage) for stage in range(4)])]
    beside = () if peers == NOBODY else split_names("--peers", peers, PEERS)
    scale = QUICK if quick else FOR_WIRE if wire else FULL
    if chart is not None and not chart.parent.is_dir():
        raise BadArgument(f"--chart: there is no folder '{chart.parent}'")
    carrier = check_controller(controller)
    try:
        Samples(text, scale.length, 1, 0, 1)  # also encodes the text, once for all ranks
    except ValueError as error:
        raise BadArgument(f"--text: {error}") from None
    run = Run(
        output_folder(output, "bench-shard"), size, text, scale, accumulate, rounds, steps, carrier, timeout
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    if wire:
        sys.exit(0 if run.wire() else 1)
    report = run.report()
    with progress_bar() as progress:
        task = progress.add_task("starting", total=1 if quick else 1 + len({OURS, *beside}))

        def show(what: str) -> None:
            progress.update(task, description=what)
            progress.advance(task)

        run.measure(report.results, contenders(chosen, beside), quick, show)
    report.seconds = run.seconds
    report.save(run.folder, chart)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {run.folder / 'shard.md'}")
    met = all(verdict.met for verdict in report.results.verdicts())
    sys.exit(0 if report.results.sound and (met or not check) else 1)


class Run:
    """One call of the command."""

    def __init__(
        self,
        folder: Path,
        size: int,
        text: str | None,
        scale: Scale,
        accumulate: int | None,
        rounds: int | None,
        steps: int | None,
        controller: str,
        timeout: float,
    ) -> None:
        self.folder, self.size, self.text, self.scale = folder, size, text, scale
        self.passes = accumulate or scale.passes
        self.rounds = rounds or scale.rounds
        self.steps = steps or scale.steps
        self.controller, self.timeout = controller, timeout
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def report(self) -> Report:
        """One without results."""
        from hvd_ckpt.bench.shard.report import Report
        from hvd_ckpt.bench.shard.results import Results

        scale = self.scale
        settings = {
            "ranks": f"{self.size} over {self.controller}",
            "sizes": f"width {scale.width}, layers {scale.layers}, heads {scale.heads}, length {scale.length}",
            "step": f"{self.passes} micro-batches of 1 sample on each rank; buckets of {scale.bucket_mb:g} MiB",
            "rounds": str(self.rounds),
        }
        command = shlex.join(["hvd-ckpt", "bench", "shard", *sys.argv[3:]])
        return Report(command, machine_facts(), settings, Results(self.size, self.passes))

    def measure(
        self, results: Results, everyone: list[Contender], quick: bool, listener: Callable[[str], object]
    ) -> None:
        """Looks at the memory of each engine in a job of its own, then times all that have not failed; ``quick``: in one job."""
        from hvd_ckpt.bench.shard.results import Result

        results.all = [Result(contender) for contender in everyone]
        if quick:
            listener("memory and time")
            self._take(results, results.all, "quick", memory=True, rounds=self.rounds)
            return
        for engine in ENGINES:
            chosen = [one for one in results.all if one.contender.engine == engine]
            if chosen:
                listener(f"memory of {ENGINES[engine][0]}")
                self._take(results, chosen, engine, memory=True, rounds=0)
        listener("time")
        self._take(
            results, [one for one in results.all if one.ranks], "time", memory=False, rounds=self.rounds
        )

    def _take(self, results: Results, chosen: list[Result], name: str, *, memory: bool, rounds: int) -> None:
        from hvd_ckpt.bench.harness.jobs import JobError
        from hvd_ckpt.bench.shard.job import Job, run_job

        names = tuple(one.contender.name for one in chosen)
        scale = self.scale
        job = Job(
            self.folder / "jobs" / name, self.size, names, self.text, scale.width, scale.layers, scale.heads, scale.length,
            self.passes, scale.bucket_mb, memory, rounds,
        )  # fmt: skip
        try:
            answers = run_job(job, self.controller, self.timeout)
        except JobError as error:
            if rounds:
                results.failure = str(error)
            else:
                for one in chosen:
                    one.failure = str(error)
            return
        results.take(answers, names, memory=memory, time=rounds > 0)

    def wire(self) -> bool:
        """Trains in each format and tells of it; whether it could."""
        from hvd_ckpt.bench.harness.jobs import JobError
        from hvd_ckpt.bench.shard.wire import FORMATS, STAGES, WireJob, run_wire_job, wire_table

        scale = self.scale
        job = WireJob(
            self.folder / "jobs" / "wire", self.size, self.text, scale.width, scale.layers, scale.heads, scale.length,
            self.passes, scale.bucket_mb, self.steps,
        )  # fmt: skip
        with progress_bar() as progress:
            progress.add_task(f"{len(FORMATS) * len(STAGES)} runs", total=None)
            try:
                courses = run_wire_job(job, self.controller, self.timeout)
            except JobError as error:
                click.echo(f"no result: {error}")
                return False
        table, report = wire_table(courses), self.report()
        report.seconds = self.seconds
        table.print(console_for_tables(WIDTH))
        write_text("\n".join([*report.head(), "", *table.markdown()]), self.folder / "wire.md")
        write_json([vars(course) for course in courses], self.folder / "wire.json")
        click.echo(f"Report: {self.folder / 'wire.md'}")
        return True
