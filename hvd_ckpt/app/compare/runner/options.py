"""How a benchmark command runs: options, output folder, progress, report, exit status."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from hvd_ckpt.app.cli.command_line import OneLineErrors, console_for_tables, output_folder, progress_bar
from hvd_ckpt.app.cli.options import options_of, settings_of
from hvd_ckpt.app.cli.tables import Table
from hvd_ckpt.app.compare.runner.report import Report, machine_facts
from hvd_ckpt.app.compare.runner.settings import BenchSettings

WIDTH = 180  # of tables where the output is not a terminal


class BenchRun:
    """One run of a benchmark command.

    Args:
        output: the folder that the user named, if any.
    """

    def __init__(self, name: str, output: str | None, settings: BenchSettings | None = None) -> None:
        self.name, self._output = name, output
        self._settings = settings or BenchSettings()
        self._start = time.monotonic()

    @cached_property
    def folder(self) -> Path:
        """The folder of the report, made when it is first asked for: check all arguments before.

        Raises:
            BadArgument: it holds something, or cannot be written to.
        """
        return output_folder(self._output, self.name)

    @property
    def jobs(self) -> Path:
        """The folder for jobs and their logs."""
        return self.folder / "jobs"

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """The progress over so many parts: a function that shows what is done now, and that so many parts more are done.

        SIGTERM ends the ranks that are running.
        """
        # By an exception: the context of the job that runs then ends its processes, which would live on if
        # this one ended as it does by default.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            with progress_bar() as progress:
                task = progress.add_task("starting", total=total)
                yield lambda what, done: progress.update(task, description=what, advance=done)
        finally:
            signal.signal(signal.SIGTERM, before)

    def report(
        self, title: str, tables: list[Table], results: Any, facts: Mapping[str, Any], **more: Any
    ) -> Report:
        """A report with the machine and the settings.

        Args:
            facts: further lines, or others in the place of settings.
            **more: further attributes of the report.
        """
        # Of options, those that say what is measured.
        values = {name: value for name, value in self._settings if name not in ("quick", "timeout")}
        lines = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in {**values, **facts}.items()
            if value is not None
        }
        return Report(title, machine_facts() | lines, tables, results, settings=values, **more)

    def save(self, report: Report) -> None:
        """Writes the report; call it after each part too, and a long run that is ended leaves what it has found."""
        path = click.get_current_context().command_path
        command = f"{path} {shlex.join(sys.argv[2:])}".strip()
        report.facts.update({"took": f"{time.monotonic() - self._start:.0f} s", "command": command})
        report.save(self.folder)

    def finish(self, report: Report) -> None:
        """Writes and prints the report, and ends the command with exit status 0 after success, else 1."""
        self.save(report)
        report.print(console_for_tables(WIDTH))
        click.echo(f"Report: {self.folder / 'report.md'}")
        sys.exit(0 if report.success else 1)


def bench_command(
    name: str, help: str, settings: type[BenchSettings], function: Callable[[BenchRun, Any], None]
) -> click.Command:
    """The command of that name, with options that follow from the settings, and ``--output``.

    The function gets a :class:`BenchRun` and its settings. Bad arguments end it with one line and exit status 2.
    """

    def command(output: str | None, **options: Any) -> None:
        chosen = settings_of(settings, options)
        function(BenchRun(name, output, chosen), chosen)

    default = f"For the report.  [default: runs/{name}-<time>]"
    output = click.Option(["--output"], metavar="FOLDER", help=default)
    params = [output, *options_of(settings)]
    return OneLineErrors(name, callback=command, params=params, help=inspect.cleandoc(help))
