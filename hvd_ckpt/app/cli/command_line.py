"""Common parts of commands: one-line errors for invalid arguments, lists of names, folders for results, progress.

An invalid argument ends a command with one line and exit status 2. Status 1 means that a command ran and its result is bad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_ckpt.processes.launchers import launched_rank
from hvd_ckpt.utils.folders import new_folder
from hvd_ckpt.utils.text import Heartbeat, elapsed, one_line, talking

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
    text: str, known: Iterable[str] | None = None, find: Callable[[str], object] = lambda name: None
) -> tuple[str, ...]:
    """The comma-separated names in ``text``, each once and, if ``known`` are given, one of them.

    Args:
        find: looks a name up, and raises ValueError if there is nothing of that name.

    Raises:
        ValueError: the list is empty, or a name is unknown or given twice.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("give at least one, separated by commas")
    for name in names:
        if known is not None and name not in known:
            raise ValueError(f"'{name}' is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ValueError(f"'{name}' is given twice")
        find(name)
    return names


def output_folder(name: str | None, command: str) -> Path:
    """The folder for a command's results, made and empty: that of the name, else ``runs/<command>-<time>``.

    Raises:
        BadArgument: it holds something, or cannot be written to.
    """
    try:
        return new_folder(name, command)
    except ValueError as error:
        raise BadArgument(f"--output: {error}") from None


def saying(name: str, after: float = 0.0) -> AbstractContextManager[Callable[[str], None]]:
    """:func:`~hvd_ckpt.utils.text.talking`, of several ranks on the first."""
    return nullcontext(lambda text: None) if launched_rank() else talking(name, after)


def progress_bar() -> Progress:
    """A live line of progress on a terminal; elsewhere a line at least every 30 seconds."""
    console = Console(stderr=True)
    # A log file or a pipe must not fill with the control characters of a live line.
    if not console.is_terminal:
        return _Lines(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


class _Lines(Progress):
    """Progress where there is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, disable=True)
        self._beat = Heartbeat(self._speak)

    def start(self) -> None:
        self._beat.__enter__()

    def stop(self) -> None:
        self._beat.__exit__()

    def _speak(self) -> None:
        for task in self.tasks:
            if not task.finished:
                done = "" if task.total is None else f"  {task.completed:g}/{task.total:g}"
                line = f"{task.description}{done}  {elapsed(task.elapsed or 0)}"
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def console_for_tables(width: int = 120) -> Console:
    """Standard output; of that width where it is not a terminal."""
    console = Console()
    # rich would fold a table to 80 columns there, in the middle of numbers.
    return console if console.is_terminal else Console(width=width)
