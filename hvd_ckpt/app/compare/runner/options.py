"""How a benchmark command runs: options, output folder, parts and their failures, progress, report, exit status."""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress, TaskID

from hvd_ckpt.app.cli.command_line import (
    OneLineErrors,
    console_for_tables,
    output_folder,
    progress_bar,
)
from hvd_ckpt.app.cli.options import options_of
from hvd_ckpt.app.compare.runner import jobs
from hvd_ckpt.app.compare.runner.jobs import R, RankJob
from hvd_ckpt.app.compare.runner.report import Report, Table, machine_facts
from hvd_ckpt.app.compare.runner.settings import BenchSettings

LONGEST = 7200.0  # seconds, of a job
SUITES = "python -m benchmarks"  # the program whose commands they are


class Steps:
    """The progress of a benchmark: a live line on a terminal, elsewhere a line at least every 30 seconds."""

    def __init__(self, run: BenchRun, progress: Progress, task: TaskID) -> None:
        self._run, self._progress, self._task, self._started = run, progress, task, 0

    def start(self, description: str) -> None:
        """Shows what is done next; what was started before it is done."""
        self._progress.update(self._task, description=description, completed=self._started)
        self._started += 1

    def show(self, description: str, advance: int = 0) -> None:
        """Shows what is done now, and that so many parts more are done."""
        self._progress.update(self._task, description=description, advance=advance)

    def job(
        self, what: str, job: RankJob, result: type[R], *, name: str = "", controller: str = "", **more: Any
    ) -> list[R]:
        """Runs a job, and saves the report of everything before it.

        Args:
            what: shown while it runs.
            job, result: as in :func:`run_job`.
            name: of what fails with it, by default ``what``; once a job has failed, later ones of the same name are left out.
            controller: by default that of the settings, as is the longest time of the job.
            **more: further arguments of :func:`run_job`.

        Returns:
            The result of each rank; nothing if the job fails, which is noted in :attr:`BenchRun.failures`, or is left out.
        """
        name, settings = name or what, self._run.settings
        self.start(what)
        if name in self._run.failures:
            return []
        # Before a job, not after it: what the caller adds after the last job is saved with the next.
        if self._run.make_report is not None:
            self._run.save(self._run.make_report())
        controller = controller or getattr(settings, "controller", "gloo")
        timeout = getattr(settings, "timeout", LONGEST)
        try:
            return jobs.run_job(job, result, controller, timeout, **more)
        except jobs.JobError as error:
            self._run.failures[name] = str(error)
            return []


class BenchRun:
    """One run of a benchmark command.

    Args:
        name: of the command, such as ``reduce``.
        output: the folder that the user named, if any.
        width: of the tables where the output is not a terminal.
        settings: of the command, if it has declared them.
        program: the words before the name.

    Attributes:
        failures: why jobs failed, by their name.
        make_report: the report of what was measured so far; where it is set, a long run that is ended leaves what it has found.
    """

    def __init__(
        self,
        name: str,
        output: str | None,
        width: int,
        settings: BenchSettings | None = None,
        program: str = SUITES,
    ) -> None:
        self._name, self._output, self._width, self._program = name, output, width, program
        self.settings = settings or BenchSettings()
        self.failures: dict[str, str] = {}
        self.make_report: Callable[[], Report] | None = None
        self._start = time.monotonic()

    @cached_property
    def folder(self) -> Path:
        """The folder of the report, made when it is first asked for: check all arguments before.

        Raises:
            BadArgument: it holds something, or cannot be written to.
        """
        return output_folder(self._output, self._name)

    @property
    def jobs(self) -> Path:
        """The folder for jobs and their logs."""
        return self.folder / "jobs"

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Steps]:
        """The progress over so many parts; SIGTERM ends the ranks that are running."""
        # By an exception: the context of the job that runs then ends its processes, which would live on if
        # this one ended as it does by default.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            with progress_bar() as progress:
                yield Steps(self, progress, progress.add_task("starting", total=total))
        finally:
            signal.signal(signal.SIGTERM, before)

    def report(
        self,
        title: str,
        tables: list[Table],
        results: Any,
        facts: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Report:
        """A report with the machine, the settings and the failures so far.

        Args:
            title, tables, results: of the report.
            facts: further lines, or others in the place of settings.
            **more: further attributes of the report.
        """
        values = self.settings.chosen()
        lines = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in {**values, **(facts or {})}.items()
            if value is not None
        }
        failures = [f"{name}: {why}" for name, why in self.failures.items()]
        return Report(title, machine_facts() | lines, tables, results, failures, settings=values, **more)

    def save(self, report: Report) -> None:
        """Writes the report; call it after each part too, and a long run that is ended leaves what it has found."""
        command = shlex.join([*self._program.split(), self._name, *sys.argv[2:]])
        report.facts.update({"took": f"{time.monotonic() - self._start:.0f} s", "command": command})
        report.save(self.folder)

    def finish(self, report: Report | None = None, success: bool | None = None) -> None:
        """Writes and prints the report, by default that of :attr:`make_report`, and ends the command.

        The exit status is 0 after ``success``, by default if no job has failed, else 1.
        """
        if report is None:
            assert self.make_report is not None
            report = self.make_report()
        self.save(report)
        report.print(console_for_tables(self._width))
        click.echo(f"Report: {self.folder / 'report.md'}")
        sys.exit(0 if (not self.failures if success is None else success) else 1)


def bench_command(
    settings: type[BenchSettings], width: int = 130, program: str = SUITES
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function a command of its name, with the option ``--output``.

    The function gets a :class:`BenchRun` and its settings. Bad arguments end it with one line and exit status 2.

    Args:
        settings: the class from which its options follow.
        width: of its tables where the output is not a terminal.
        program: the words before its name.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        name = function.__name__

        @functools.wraps(function)
        def command(output: str | None, **options: Any) -> None:
            chosen = settings.make(options)
            function(BenchRun(name, output, width, chosen, program), chosen)

        default = f"runs/{name}-<time>"
        option = click.option("--output", metavar="FOLDER", help=f"For the report.  [default: {default}]")
        made = click.command(function.__name__, cls=OneLineErrors)(option(command))
        made.params += options_of(settings)
        return made

    return decorate
