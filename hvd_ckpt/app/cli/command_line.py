"""Common parts of commands: one-line errors for invalid arguments, lists of names, folders for results, progress.

An invalid argument ends a command with one line and exit status 2. Status 1 means that a command ran and its result is bad.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvd_ckpt.processes.launchers import launched_rank
from hvd_ckpt.utils.folders import new_folder
from hvd_ckpt.utils.text import Heartbeat, elapsed, one_line

if TYPE_CHECKING:
    import torch


MOMENT = 3.0  # seconds


class BadArgument(click.ClickException):
    """One line, exit status 2.

    Of several ranks, whose command line is the same, rank 0 says it. The others give it a moment to do so: the launcher ends all
    ranks when one has ended.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))

    def show(self, file: IO[Any] | None = None) -> None:
        if not launched_rank():
            super().show(file)
        else:
            time.sleep(MOMENT)


class OneLineErrors(click.Command):
    """A command that answers bad arguments with one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # click lists options that are hardly alike; the nearest one is enough.
            if isinstance(error, click.NoSuchOption):
                nearest = get_close_matches(error.option_name, error.possibilities or [], n=1)
                error = click.NoSuchOption(error.option_name, possibilities=nearest, ctx=error.ctx)
            raise BadArgument(error.format_message()) from None


def split_names(
    option: str,
    text: str,
    known: Iterable[str] | None = None,
    find: Callable[[str], object] = lambda name: None,
) -> tuple[str, ...]:
    """The comma-separated names in ``text``, each once and, if ``known`` are given, one of them.

    Args:
        find: looks a name up, and raises ValueError if there is nothing of that name.

    Raises:
        BadArgument: the list is empty, or a name is unknown or given twice.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BadArgument(f"{option}: give at least one, separated by commas")
    for name in names:
        if known is not None and name not in known:
            raise BadArgument(f"{option}: '{name}' is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise BadArgument(f"{option}: '{name}' is given twice")
        try:
            find(name)
        except ValueError as error:
            raise BadArgument(f"{option}: {error}") from None
    return names


_OF_MODELS = (
    click.option("--model", "name", metavar="NAME", help="A name, a folder, or module:function."),
    click.option(
        "--model-option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Option of the model, such as layers=2; may be given several times.",
    ),
    click.option("--length", type=click.IntRange(2), help="Tokens of a sequence.  [default: by model]"),
    click.option(
        "--vocabulary",
        type=click.IntRange(2),
        help="Number of different tokens.  [default: bytes and special tokens]",
    ),
    click.option("--pixels", type=click.IntRange(1), help="Side of an image or volume.  [default: by model]"),
    click.option("--channels", type=click.IntRange(1), help="Channels of an image or volume.  [default: 1]"),
    click.option(
        "--classes",
        type=click.IntRange(2),
        help="Classes of images or voxels.  [default: those of train's data]",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        help="bf16 and fp16 run under autocast.  [default: fp32]",
    ),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda, or cuda:N."),
)


def takes_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say which model runs, the sizes of its batches beside their samples, and where and how it runs."""
    for option in reversed(_OF_MODELS):
        command = option(command)
    return command


def take_options(options: dict[str, Any], names: tuple[str, ...], needed: str) -> dict[str, Any]:
    """Takes options that are given out of the command's; none of ``names`` can do without the first."""
    # Taken out: what is left of the options goes to the model as sizes, which refuses unknown ones.
    given = {name: value for name in names if (value := options.pop(name)) is not None}
    if given and names[0] not in given:
        name, value = next(iter(given.items()))
        raise BadArgument(f"--{name.replace('_', '-')} {value}: give {needed}, as well")
    return given


def check_controller(name: str) -> str:
    """The controller of that name, if Horovod was built with it; ``auto`` is Gloo where there is Gloo, else MPI.

    Raises:
        BadArgument: Horovod was built without it.
    """
    from hvd_ckpt.processes import runtime

    build = runtime.horovod_build()
    if name == "auto":
        name = "gloo" if build["gloo"] else "mpi"
    if not build[name]:
        raise BadArgument(f"--controller {name}: this Horovod was built without it; see `hvd-ckpt doctor`")
    return name


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        BadArgument: it is neither cpu nor a CUDA device of this machine.
    """
    from hvd_ckpt.processes.devices import device_named

    try:
        return device_named(name)
    except ValueError as error:
        raise BadArgument(f"--{error}") from None


def output_folder(name: str | None, command: str) -> Path:
    """The folder for a command's results, made and empty: that of the name, else ``runs/<command>-<time>``.

    Raises:
        BadArgument: it holds something, or cannot be written to.
    """
    try:
        return new_folder(name, command)
    except ValueError as error:
        raise BadArgument(f"--output: {error}") from None


def progress_bar(each: bool = False) -> Progress:
    """A live line of progress on a terminal; elsewhere a line at least every 30 seconds.

    Args:
        each: elsewhere, also print each new description of a task.
    """
    console = Console(stderr=True)
    # A log file or a pipe must not fill with the control characters of a live line.
    if not console.is_terminal:
        return _Lines(console, each)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@contextlib.contextmanager
def saying(title: str) -> Iterator[Callable[[str], None]]:
    """A function that shows what a command is doing, in a progress bar of that title; on the first of several ranks."""
    if launched_rank():
        yield lambda text: None
        return
    with progress_bar(each=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda text: progress.update(task, description=text)


class _Lines(Progress):
    """Progress where there is no terminal."""

    def __init__(self, console: Console, each: bool) -> None:
        super().__init__(console=console, disable=True)
        self._each = each
        self._beat = Heartbeat(self._speak)

    def start(self) -> None:
        self._beat.__enter__()

    def stop(self) -> None:
        self._beat.__exit__()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._each and "description" in changes:
            self._beat.said()
            self._speak()

    def _speak(self) -> None:
        for task in self.tasks:
            if not task.finished:
                done = "" if task.total is None else f"  {task.completed:g}/{task.total:g}"
                line = f"{task.description}{done}  {elapsed(task.elapsed or 0)}"
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def console_for_tables(width: int) -> Console:
    """Standard output; of that width where it is not a terminal."""
    console = Console()
    # rich would fold a table to 80 columns there, in the middle of numbers.
    return console if console.is_terminal else Console(width=width)
