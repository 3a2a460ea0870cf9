"""``hvd-ckpt bench faults``.

Exit status 0 if everything held, 1 if not, 2 for a bad argument.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import click
from pydantic import Field, TypeAdapter, ValidationError

from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.bench.harness.jobs import JobError
from hvd_ckpt.bench.harness.options import (
    BenchRun,
    bench_command,
    check_replicas,
    timeout_option,
    whole_numbers,
)
from hvd_ckpt.bench.harness.report import Report, machine_facts

if TYPE_CHECKING:
    from hvd_ckpt.bench.faults.kill import Killed
    from hvd_ckpt.bench.faults.save import SaveKill

    Recorded: TypeAlias = Killed | SaveKill

SOAK_RANKS = 2
STALL_MEGABYTES = 150


@bench_command("faults", width=170)
@click.option("--runs", type=click.IntRange(0), default=20, show_default=True, help="Runs that are killed.")
@click.option("--saves", type=click.IntRange(0), default=200, show_default=True, help="Kills within a save.")
@click.option(
    "--soak", "minutes", type=click.FloatRange(0), default=0, help="Minutes of the soak.  [default: none]"
)
@click.option(
    "--stall-rounds", type=click.IntRange(0), default=0, help="Rounds of timed snapshots.  [default: none]"
)
@click.option("--np", "sizes", default="2,4", show_default=True, help="Numbers of ranks of the runs.")
@click.option(
    "--stages", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages of the runs."
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Logical replicas of the runs: each launch is on another of the numbers of ranks, and all runs end in the same bits.",
)
@click.option(
    "--elastic", is_flag=True, help="Jobs of Horovod Elastic on two names of this machine; needs --replicas."
)
@click.option(
    "--controller", "controllers", default="auto", show_default=True, help="What starts the ranks: gloo,mpi."
)
@click.option("--seed", type=click.IntRange(0), help="Of the first run.  [default: 1, or the next of --add]")
@click.option("--add", metavar="FILE", help="Add the results to those in a file of JSON lines.")
@timeout_option(300, "launch")
def faults(
    run: BenchRun,
    runs: int,
    saves: int,
    minutes: float,
    stall_rounds: int,
    sizes: str,
    stages: int,
    replicas: int | None,
    elastic: bool,
    controllers: str,
    seed: int | None,
    add: str | None,
    timeout: float,
) -> None:
    """Kill training and saving at random moments, and check what is lost.

    Runs are killed, restarted and compared with an undisturbed run; a process is killed within its saves; the processes of a long
    run are measured. Everything random follows from the seed: run i has the seed S + i, and --runs 1 --seed S+i repeats it.
    """
    from hvd_ckpt.bench.faults.kill import Killed, Variant, kill_report, kill_runs, write_text
    from hvd_ckpt.bench.faults.save import SaveError, SaveKill, save_kills, save_report
    from hvd_ckpt.bench.faults.soak import soak, soak_report
    from hvd_ckpt.bench.faults.stall import measure_stall, stall_report

    numbers = list(whole_numbers("--np", sizes, "ranks"))
    if any(number % stages for number in numbers):
        raise BadArgument(f"--stages {stages}: --np {sizes} has other numbers than its multiples")
    if replicas is not None:
        check_replicas(replicas, numbers)
    if elastic and (replicas is None or min(numbers) < 2 or controllers not in ("auto", "gloo")):
        raise BadArgument(
            f"--elastic: give --replicas, 2 or more ranks (--np {sizes}), and no controller but gloo"
        )
    names = ["gloo"] if elastic else split_names("--controller", controllers, ("auto", "gloo", "mpi"))
    chosen = list(dict.fromkeys(check_controller(name) for name in names))
    file = None if add is None else Path(add)
    try:
        recorded = [] if file is None else load_results(file)
    except ValueError as error:
        raise BadArgument(f"--add: {error}") from None
    first = seed if seed is not None else max((one.seed for one in recorded), default=0) + 1
    folder = run.folder
    parts: dict[str, Report] = {}
    failures: list[str] = []

    def keep(result: Recorded) -> None:
        if file is not None:
            add_result(file, result)
            recorded[:] = load_results(file)

    def report() -> Report:
        found = parts.values()
        return Report(
            "Faults",
            machine_facts(),
            [table for part in found for table in part.tables],
            results={name: {"sound": part.success, "found": part.results} for name, part in parts.items()},
            remarks=[*(line for part in found for line in part.remarks), *failures],
            notes=[line for part in found for line in part.notes],
        )

    with run.progress(runs + saves + bool(minutes) + bool(stall_rounds)) as progress:
        killed: list[Killed] = []
        progress.start(f"killed runs, seed {first}")
        try:
            seeds = range(first, first + runs)
            variant = Variant(stages, replicas, elastic)
            place = folder / "runs"
            for one in kill_runs(seeds, numbers, chosen, place, timeout, variant) if runs else ():
                killed.append(one)
                keep(one)
                parts["kill"] = kill_report(killed, [one for one in recorded if isinstance(one, Killed)])
                run.save(report())  # a long run that is ended leaves its results
                progress.start(f"killed runs, seed {one.seed + 1}")
        except JobError as error:
            failures.append(str(error))
        saved: list[SaveKill] = []
        try:
            for kill in save_kills(folder / "saves", saves, first) if saves else ():
                saved.append(kill)
                keep(kill)
                progress.start("kills within a save")
        except SaveError as error:
            failures.append(f"the save test ended after {len(saved)} of {saves} kills: {error}")
        if saves:
            parts["save"] = save_report(saved, [one for one in recorded if isinstance(one, SaveKill)])
        if minutes:
            progress.start("soak")
            soaked = soak(
                minutes, SOAK_RANKS, chosen[0], write_text(folder), folder / "soak",
                lambda passed: progress.show(f"soak, {passed / 60:.1f} of {minutes:g} minutes"),
            )  # fmt: skip
            parts["soak"] = soak_report(soaked)
            run.save(report())
        if stall_rounds:
            progress.start("stall")
            parts["stall"] = stall_report(measure_stall(stall_rounds, STALL_MEGABYTES, folder))
    run.finish(report(), not failures and all(part.success for part in parts.values()))


def load_results(path: Path) -> list[Recorded]:
    """The results in a file of JSON lines; of a seed that was run again only the last.

    Raises:
        ValueError: the file cannot be read or created, or a line is not a result; the message names file and line.
    """
    if not path.parent.is_dir():
        raise ValueError(f"the folder of '{path}' does not exist: create it, or give another file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read '{path}': {error}") from None
    from hvd_ckpt.bench.faults.kill import Killed
    from hvd_ckpt.bench.faults.save import SaveKill

    reader: TypeAdapter[Recorded] = TypeAdapter(Annotated[Killed | SaveKill, Field(discriminator="kind")])
    found: dict[object, Recorded] = {}
    for number, line in enumerate(lines, 1):
        try:
            one = reader.validate_json(line, strict=True)
        except ValidationError:
            raise ValueError(
                f"'{path}', line {number} is not a result of this test: give the file of an earlier call, or a new one"
            ) from None
        which = (one.number,) if isinstance(one, SaveKill) else (one.size, one.controller)
        found[one.kind, one.seed, which] = one
    return list(found.values())


def add_result(path: Path, result: Recorded) -> None:
    """Append a result to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")
