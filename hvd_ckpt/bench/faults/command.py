"""``hvd-ckpt bench faults``: options, progress, tables, exit status.

Exit status 0 if everything held, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import Progress

from hvd_ckpt.command_line import (
    BadArgument,
    OneLineErrors,
    check_controller,
    console_for_tables,
    output_folder,
    progress_bar,
    split_names,
    whole_number,
)
from hvd_ckpt.machine import machine_facts

if TYPE_CHECKING:
    from hvd_ckpt.bench.faults.kill import Killed
    from hvd_ckpt.bench.faults.records import Records
    from hvd_ckpt.bench.faults.report import Report
    from hvd_ckpt.bench.faults.save import SaveKill

__all__ = ["faults"]

WIDTH = 130  # of the tables where the output is not a terminal
SOAK_RANKS = 2
STALL_MEGABYTES = 150


@click.command("faults", cls=OneLineErrors)
@click.option("--runs", type=click.IntRange(0), default=20, show_default=True, help="Runs that are killed.")
@click.option("--saves", type=click.IntRange(0), default=200, show_default=True, help="Kills within a save.")
@click.option(
    "--soak", "minutes", type=click.FloatRange(0), default=0, help="Minutes of the soak.  [default: none]"
)
@click.option(
    "--stall-rounds",
    type=click.IntRange(0),
    default=0,
    help="Rounds of snapshots that are timed.  [default: none]",
)
@click.option("--np", "sizes", default="2,4", show_default=True, help="Numbers of ranks of the runs.")
@click.option(
    "--controller", "controllers", default="auto", show_default=True, help="What starts the ranks: gloo,mpi."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=None,
    help="Of the first run.  [default: 1, or the next of --add]",
)
@click.option("--add", metavar="FILE", default=None, help="Add the results to those in a file of JSON lines.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=300,
    show_default=True,
    help="Seconds for one launch of a run.",
)
@click.option(
    "--output", metavar="FOLDER", default=None, help="For the report.  [default: runs/bench-faults-<time>]"
)
def faults(
    runs: int,
    saves: int,
    minutes: float,
    stall_rounds: int,
    sizes: str,
    controllers: str,
    seed: int | None,
    add: str | None,
    timeout: float,
    output: str | None,
) -> None:
    """Kill training and saving at random moments, and look at what is lost.

    Runs are killed, restarted and compared with one that nobody disturbs; a process is killed within its saves; a long run is
    watched for growth. What is drawn follows from the seed: run i has the seed S + i, and --runs 1 --seed S+i repeats it.
    """
    from hvd_ckpt.bench.faults.records import Records
    from hvd_ckpt.bench.faults.report import Report

    numbers = [whole_number("--np", text, "ranks") for text in split_names("--np", sizes)]
    carriers = list(
        dict.fromkeys(
            check_controller(name)
            for name in split_names("--controller", controllers, ("auto", "gloo", "mpi"))
        )
    )
    try:
        records = None if add is None else Records(Path(add))
    except ValueError as error:
        raise BadArgument(f"--add: {error}") from None
    first = seed if seed is not None else 1 if records is None else records.next_seed
    folder = output_folder(output, "bench-faults")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running ranks are ended on the way out
    report = Report(shlex.join(["hvd-ckpt", "bench", "faults", *sys.argv[3:]]), machine_facts())
    with progress_bar() as progress:
        call = _Call(folder, first, timeout, records, report, progress)
        if runs:
            call.kill(runs, numbers, carriers)
        if saves:
            call.save(saves)
        if minutes:
            call.soak(minutes, carriers[0])
        if stall_rounds:
            call.stall(stall_rounds)
    report.print(console_for_tables(WIDTH))
    click.echo(f"Report: {folder / 'report.md'}")
    sys.exit(0 if report.sound else 1)


@dataclass
class _Call:
    folder: Path
    seed: int
    timeout: float
    records: Records | None
    report: Report
    progress: Progress
    start: float = field(default_factory=time.monotonic)

    def kill(self, runs: int, sizes: list[int], controllers: list[str]) -> None:
        """Folders of runs that were right are removed."""
        from hvd_ckpt.bench.faults.drawing import draw
        from hvd_ckpt.bench.faults.kill import STEPS, JobError, disturbed_run, undisturbed_run, write_text
        from hvd_ckpt.bench.faults.report import kill_section

        task = self.progress.add_task("killed runs", total=runs)
        folder = self.folder / "runs"
        folder.mkdir()
        text = write_text(folder)
        references: dict[tuple[int, str], Path] = {}
        found: list[Killed] = []
        fault = None
        for seed in range(self.seed, self.seed + runs):
            chosen = draw(seed, sizes, controllers, STEPS)
            ranks = (chosen.size, chosen.controller)
            try:
                if ranks not in references:
                    name = f"undisturbed-{chosen.size}-{chosen.controller}"
                    references[ranks] = undisturbed_run(*ranks, text, folder / name, self.timeout)
            except JobError as error:
                fault = str(error)
                break
            run = disturbed_run(chosen, text, references[ranks], folder / f"seed-{seed}", self.timeout)
            found.append(run)
            if run.sound:
                shutil.rmtree(folder / f"seed-{seed}")
            self._record(run)
            self.report.sections["kill"] = kill_section(found, self.records.killed if self.records else ())
            self._saved()
            self.progress.advance(task)
        self.report.sections["kill"] = kill_section(found, self.records.killed if self.records else (), fault)

    def save(self, saves: int) -> None:
        from hvd_ckpt.bench.faults.report import save_section
        from hvd_ckpt.bench.faults.save import SaveError, save_kills

        task = self.progress.add_task("kills within a save", total=saves)
        found: list[SaveKill] = []
        fault = None

        def each(kill: SaveKill) -> None:
            found.append(kill)
            self._record(kill)
            self.progress.advance(task)

        try:
            save_kills(self.folder / "saves", saves, self.seed, each)
        except SaveError as error:
            fault = str(error)
        self.report.sections["save"] = save_section(found, self.records.saves if self.records else (), fault)
        self._saved()

    def soak(self, minutes: float, controller: str) -> None:
        from hvd_ckpt.bench.faults.kill import write_text
        from hvd_ckpt.bench.faults.report import soak_section
        from hvd_ckpt.bench.faults.soak import soak

        task = self.progress.add_task("soak, seconds", total=round(minutes * 60))
        folder = self.folder / "soak"
        text = write_text(self.folder)
        soaked = soak(
            minutes,
            SOAK_RANKS,
            controller,
            text,
            folder,
            lambda passed: self.progress.update(task, completed=round(passed)),
        )
        self.report.sections["soak"] = soak_section(soaked)
        self._saved()

    def stall(self, rounds: int) -> None:
        from hvd_ckpt.bench.faults.report import stall_section
        from hvd_ckpt.bench.faults.stall import measure_stall

        folder = self.folder / "stall"
        folder.mkdir()
        self.progress.add_task("stall", total=rounds)
        self.report.sections["stall"] = stall_section(measure_stall(rounds, STALL_MEGABYTES, folder))
        self._saved()

    def _record(self, result: Killed | SaveKill) -> None:
        if self.records is not None:
            self.records.add(result)

    def _saved(self) -> None:
        """A long call that is ended leaves what it has found."""
        self.report.seconds = time.monotonic() - self.start
        self.report.save(self.folder)
