"""What ``python -m benchmarks faults`` does: the parts one after the other, a report, and the results of several calls in one file.

``kill`` has the kill test, ``save`` the save test, ``soak`` the leak test, ``stall`` the time of snapshots. ``job`` observes
``hvd-ckpt train`` from outside, and ``checks`` looks into the snapshots that it leaves.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

from faults.kill import Killed, KillTest, kill_report, kill_runs
from faults.save import SaveError, SaveKill, SaveTest, save_report
from faults.soak import soak, soak_report
from faults.stall import measure_stall, stall_report
from pydantic import Field, TypeAdapter, ValidationError

from benchmarks.suites.faults import FaultSettings
from hvd_ckpt.app.cli.command_line import BadArgument, check_controller, split_names
from hvd_ckpt.app.compare.runner.jobs import JobError
from hvd_ckpt.app.compare.runner.options import BenchRun
from hvd_ckpt.app.compare.runner.report import Report, machine_facts

Result = Killed | SaveKill


def run_faults(run: BenchRun, settings: FaultSettings) -> None:
    """Runs the parts that are asked for, and ends the command.

    Raises:
        BadArgument: a controller or the file of results cannot be used.
    """
    runs, saves, minutes, rounds = settings.runs, settings.saves, settings.minutes, settings.stall_rounds
    names = "gloo" if settings.elastic else settings.controllers
    chosen = map(check_controller, split_names("--controller", names, ("auto", "gloo", "mpi")))
    file = None if settings.add is None else Path(settings.add)
    try:
        recorded = [] if file is None else load_results(file)
    except ValueError as error:
        raise BadArgument(f"--add: {error}") from None
    seed = settings.seed
    first = seed if seed is not None else max((result.seed for result in recorded), default=0) + 1
    kills = KillTest(
        run.folder / "runs",
        settings.sizes,
        list(dict.fromkeys(chosen)),
        settings.timeout,
        stages=settings.stages,
        tensor=settings.tensor,
        replicas=settings.replicas,
        elastic=settings.elastic,
    )
    killed: list[Killed] = []
    saved: list[SaveKill] = []
    parts: dict[str, Report] = {}
    failures: list[str] = []

    def keep(result: Result) -> None:
        if file is not None:
            add_result(file, result)
            recorded[:] = load_results(file)

    def report() -> Report:
        return Report(
            "Faults",
            machine_facts(),
            [table for part in parts.values() for table in part.tables],
            results={name: {"sound": part.success, "found": part.results} for name, part in parts.items()},
            remarks=[*(line for part in parts.values() for line in part.remarks), *failures],
            notes=[line for part in parts.values() for line in part.notes],
        )

    with run.progress(runs + saves + bool(minutes) + bool(rounds)) as progress:
        progress.start(f"killed runs, seed {first}")
        try:
            for result in kill_runs(kills, range(first, first + runs)) if runs else ():
                killed.append(result)
                keep(result)
                parts["kill"] = kill_report(
                    killed, [before for before in recorded if isinstance(before, Killed)]
                )
                run.save(report())  # a long run that is ended leaves its results
                progress.start(f"killed runs, seed {result.seed + 1}")
        except JobError as error:
            failures.append(str(error))
        if saves:
            try:
                test = SaveTest(run.folder / "saves", first)
                for number in range(saves):
                    saved.append(test.kill(number))
                    keep(saved[-1])
                    progress.start("kills within a save")
            except SaveError as error:
                failures.append(f"the save test ended after {len(saved)} of {saves} kills: {error}")
            parts["save"] = save_report(
                saved, [before for before in recorded if isinstance(before, SaveKill)]
            )
        if minutes:
            progress.start("soak")
            soaked = soak(
                minutes, kills.controllers[0], run.folder / "soak",
                lambda passed: progress.show(f"soak, {passed / 60:.1f} of {minutes:g} minutes"),
            )  # fmt: skip
            parts["soak"] = soak_report(soaked)
            run.save(report())
        if rounds:
            progress.start("stall")
            parts["stall"] = stall_report(measure_stall(rounds, run.folder / "stall"))
    run.finish(report(), not failures and all(part.success for part in parts.values()))


def load_results(path: Path) -> list[Result]:
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
    reader: TypeAdapter[Result] = TypeAdapter(Annotated[Result, Field(discriminator="kind")])
    results: dict[object, Result] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = reader.validate_json(line, strict=True)
        except ValidationError:
            raise ValueError(
                f"'{path}', line {number} is not a result of this test: give the file of an earlier call, or a new one"
            ) from None
        which = (result.number,) if isinstance(result, SaveKill) else (result.size, result.controller)
        results[result.kind, result.seed, which] = result
    return list(results.values())


def add_result(path: Path, result: Result) -> None:
    """Appends a result to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")
