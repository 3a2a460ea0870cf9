"""``hvd-ckpt bench reduce``: options, progress, table, exit status.

Exit status 0 if every engine was measured everywhere, 1 if one failed, 2 for a bad argument.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_ckpt import runtime
from hvd_ckpt.benchmark.reduce import Case, Plan
from hvd_ckpt.benchmark.report import Report, machine_facts
from hvd_ckpt.benchmark.workloads import WORKLOADS
from hvd_ckpt.comparison.engines import find_engine

__all__ = ["bench"]

ENGINES = "hvd_ckpt,horovod,ddp"
PAIRS, QUICK_PAIRS = 5, 3
WIDTH = 120  # of the table where the output is not a terminal


class BadArgument(click.ClickException):
    """One line, exit status 2: 1 is for an engine that failed."""

    exit_code = 2


class OneLineErrors(click.Command):
    """A command that answers bad arguments with one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise BadArgument(error.format_message()) from None


@click.group("bench")
def bench() -> None:
    """Measure how fast things are, beside other engines."""


@bench.command("reduce", cls=OneLineErrors)
@click.option("--np", "sizes", default=None, help="Numbers of ranks.  [default: 2,4; with --quick 2]")
@click.option(
    "--controller", "controllers", default="gloo,mpi", show_default=True, help="What starts the ranks."
)
@click.option("--workloads", default=",".join(WORKLOADS), show_default=True, help="What is trained.")
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
    chosen = _names("--engines", engines)
    for engine in chosen:
        try:
            find_engine(engine)
        except ValueError as error:
            raise BadArgument(f"--engines: {error}") from None
    plan = Plan(
        engines=chosen,
        sizes=tuple(_ranks(text) for text in _names("--np", sizes or ("2" if quick else "2,4"))),
        controllers=tuple(_built(name) for name in _names("--controller", controllers, ("gloo", "mpi"))),
        workloads=_names("--workloads", workloads, WORKLOADS),
        pairs=pairs or (QUICK_PAIRS if quick else PAIRS),
        steps=steps,
        timeout=timeout,
        folder=(folder := _output_folder(output)) / "jobs",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    start = time.monotonic()
    cases = _run(plan)
    command = shlex.join(["hvd-ckpt", "bench", "reduce", *sys.argv[3:]])
    report = Report(command, plan, machine_facts(), cases, time.monotonic() - start)
    report.save(folder)
    console = Console()
    report.print(console if console.is_terminal else Console(width=WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.complete else 1)


def _run(plan: Plan) -> list[Case]:
    """Run the plan with a live line of progress on a terminal, and silently elsewhere."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("starting", total=plan.jobs)
        started = 0

        def show(what: str) -> None:
            nonlocal started
            progress.update(task, description=what, completed=started)
            started += 1

        return plan.run(show)


def _names(option: str, text: str, known: Iterable[str] | None = None) -> tuple[str, ...]:
    """The comma-separated names in ``text``, each once and, if ``known`` are given, one of them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadArgument(f"{option}: give at least one, separated by commas")
    for name in names:
        if known is not None and name not in known:
            raise BadArgument(f"{option}: '{name}' is none of {', '.join(known)}")
        if names.count(name) > 1:
            raise BadArgument(f"{option}: '{name}' is given twice")
    return tuple(names)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise BadArgument(f"--np: '{text}' is not a number of ranks: give whole numbers from 1")
    return int(text)


def _built(controller: str) -> str:
    build: dict[str, Any] = runtime.horovod_build()
    if not build[controller]:
        raise BadArgument(f"--controller: this Horovod was built without {controller}; see `hvd-ckpt doctor`")
    return controller


def _output_folder(name: str | None) -> Path:
    folder = Path(name) if name else Path("runs") / time.strftime("bench-reduce-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadArgument(f"--output: the folder '{folder}' is not empty: give a new one")
    except OSError as error:
        raise BadArgument(f"--output: cannot write to '{folder}': {error.strerror}") from None
    return folder.resolve()
