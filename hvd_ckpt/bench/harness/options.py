"""Options that benchmark commands share, and how each of them runs: output folder, progress, report, exit status."""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress, TaskID

from hvd_ckpt.app.cli.command_line import (
    BadArgument,
    OneLineErrors,
    console_for_tables,
    output_folder,
    progress_bar,
    split_names,
)
from hvd_ckpt.bench.harness.report import Report
from hvd_ckpt.utils.text import BUILD_HOROVOD

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Steps:
    """The progress of a benchmark: a live line on a terminal, elsewhere a line at least every 30 seconds."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._started = progress, task, 0

    def start(self, description: str) -> None:
        """Shows what is done next; what was started before it is done."""
        self._progress.update(self._task, description=description, completed=self._started)
        self._started += 1

    def show(self, description: str, advance: int = 0) -> None:
        """Shows what is done now, and that so many parts more are done."""
        self._progress.update(self._task, description=description, advance=advance)


class BenchRun:
    """One run of a benchmark command.

    Args:
        name: the words after ``hvd-ckpt``, such as ``bench reduce``.
        output: the folder that the user named, if any.
        width: of the tables where the output is not a terminal.
    """

    def __init__(self, name: str, output: str | None, width: int) -> None:
        self._name, self._output, self._width = name, output, width
        self._start = time.monotonic()

    @cached_property
    def folder(self) -> Path:
        """The folder of the report, made when it is first asked for: check all arguments before.

        Raises:
            BadArgument: it holds something, or cannot be written to.
        """
        return output_folder(self._output, self._name.replace(" ", "-"))

    @property
    def jobs(self) -> Path:
        """The folder for jobs and their logs."""
        return self.folder / "jobs"

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Steps]:
        """The progress over so many parts; SIGTERM ends the ranks that are running."""
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            with progress_bar() as progress:
                yield Steps(progress, progress.add_task("starting", total=total))
        finally:
            signal.signal(signal.SIGTERM, before)

    def save(self, report: Report) -> None:
        """Writes the report; call it after each part too, and a long run that is ended leaves what it has found."""
        words = self._name.split()
        command = shlex.join(["hvd-ckpt", *words, *sys.argv[1 + len(words) :]])
        report.facts.update({"took": f"{time.monotonic() - self._start:.0f} s", "command": command})
        report.save(self.folder)

    def finish(self, report: Report, success: bool) -> None:
        """Writes and prints the report, and ends the command with exit status 0 or 1."""
        self.save(report)
        report.print(console_for_tables(self._width))
        click.echo(f"Report: {self.folder / 'report.md'}")
        sys.exit(0 if success else 1)


def bench_command(
    name: str, width: int = 130, group: str = "bench "
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function a command of ``hvd-ckpt bench``, or of another group, with the option ``--output``.

    The function gets a :class:`BenchRun` and its options. Bad arguments end it with one line and exit status 2.

    Args:
        name: of the command.
        width: of its tables where the output is not a terminal.
        group: the words before the name.
    """
    full_name = f"{group}{name}"

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def command(output: str | None, **options: Any) -> None:
            function(BenchRun(full_name, output, width), **options)

        default = f"runs/{full_name.replace(' ', '-')}-<time>"
        option = click.option("--output", metavar="FOLDER", help=f"For the report.  [default: {default}]")
        return click.command(name, cls=OneLineErrors)(option(command))

    return decorate


def timeout_option(seconds: float = 7200, what: str = "job") -> Decorator:
    """The option ``--timeout``, with its default."""
    text = f"Seconds for one {what}."
    return click.option("--timeout", type=click.FloatRange(1), default=seconds, show_default=True, help=text)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options ``--controller`` and ``--timeout`` of a command that starts jobs."""
    controllers = click.Choice(["auto", "gloo", "mpi"])
    text = "Controller that starts the ranks."
    controller = click.option("--controller", type=controllers, default="auto", show_default=True, help=text)
    return controller(timeout_option()(command))


def device_option(command: Callable[..., None]) -> Callable[..., None]:
    """The option ``--device`` of a command that starts jobs."""
    kinds = click.Choice(["cpu", "cuda"])
    return click.option(
        "--device", type=kinds, default="cpu", show_default=True, help="Of the ranks, each of which has one."
    )(command)


def check_devices(kind: str, ranks: int) -> None:
    """Raises BadArgument if jobs of so many ranks cannot train on such devices of this machine."""
    if kind == "cpu":
        return
    import horovod.torch as hvd
    import torch

    from hvd_ckpt.processes.devices import NO_GPU_OPERATIONS, has_gpu_operations

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        raise BadArgument(f"--device {kind}: PyTorch finds no GPU here: see `hvd-ckpt doctor`")
    if not has_gpu_operations():
        raise BadArgument(f"--device {kind}: {NO_GPU_OPERATIONS}: {BUILD_HOROVOD}")
    if ranks > visible and hvd.nccl_built():
        raise BadArgument(
            f"--device {kind}: {ranks} ranks need a GPU each, and {visible} are visible: give a smaller --np"
        )


def quick_option(help: str) -> Decorator:
    """The flag ``--quick``."""
    return click.option("--quick", is_flag=True, is_eager=True, help=help)


def count_option(*names: str, help: str, default: int, quick: int) -> Decorator:
    """An option for a number from 1 whose default depends on ``--quick``."""

    def choose(context: click.Context, option: click.Parameter, value: int | None) -> int:
        return value or (quick if context.params["quick"] else default)

    shown = f"{help}  [default: {default}; with --quick {quick}]"
    return click.option(*names, type=click.IntRange(1), callback=choose, help=shown)


def check_replicas(replicas: int, sizes: Sequence[int]) -> None:
    """Checks numbers of ranks that have so many logical replicas together.

    Raises:
        BadArgument: one of these numbers is not a power of two, or more than the replicas.
    """
    wrong = next((one for one in (replicas, *sizes) if one & (one - 1) or one > replicas), None)
    if wrong is not None:
        given = f"--replicas {replicas}, --np {','.join(map(str, sizes))}"
        raise BadArgument(f"{given}: give powers of two up to --replicas, not {wrong}")


def whole_numbers(option: str, text: str, what: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas.

    Raises:
        BadArgument: the list is empty, an entry is not a number of ``what``, or one is given twice.
    """
    names = split_names(option, text)
    for one in names:
        if not one.isdecimal() or len(one) > 18 or int(one) < 1:
            raise BadArgument(f"{option}: '{one[:40]}' is not a number of {what}: give whole numbers from 1")
    return tuple(map(int, names))
