"""The tables of ``hvd-ckpt bench faults``, and results of several calls in one file."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from hvd_ckpt.bench.faults.kill import Killed
from hvd_ckpt.bench.faults.save import PHASES, WRITERS, SaveKill
from hvd_ckpt.bench.faults.soak import EVERY, Soaked
from hvd_ckpt.bench.faults.stall import StallRow
from hvd_ckpt.bench.harness.report import Table

__all__ = ["Part", "add_result", "kill_part", "load_results", "save_part", "soak_part", "stall_part"]

KILL_NOTES = (
    "kills: who got which signal after which step; `start`: before the launch had logged a step, `*`: while a snapshot was being "
    "written; lost: restarts that resumed from before a snapshot that had been in place; unreadable: snapshots in place that some "
    "rank cannot read; left: processes that still run 30 s after the launcher has ended.",
    "equal: whether weights, optimizer state, position in the data, each rank's random state and all logged losses are those of "
    "the undisturbed run on the same ranks and controller, bit for bit.",
)
SAVE_NOTES = (
    "blocking, background: SnapshotWriter with and without blocking=True. The moment of the kill is uniform within a save; one "
    "in four is aimed at the end of a save that replaces a snapshot, from its manifest on.",
    "right: the newest snapshot that loads is whole, has the content of its write, is of no earlier write than the last that "
    "had returned, and nothing in place is damaged.",
)
SOAK_NOTES = (
    "per hour: slope of the line through the samples, without the first fifth of the time; first, last: medians of the first and "
    "of the last quarter; flat: memory rises by less than 1 % of its mean over the whole time; others do not rise.",
)
STALL_NOTES = (
    "stall: median time that training waits for one snapshot; of blocking: median of the ratios within a round; added: median "
    "time by which the steps until the snapshot is on the disk are longer than others, in sum.",
)


@dataclass
class Part:
    """The result of one test: its table, remarks, notes and figures for programs, and whether everything held."""

    table: Table
    remarks: list[str]
    notes: Sequence[str]
    results: Any
    sound: bool


def load_results(path: Path) -> list[Killed | SaveKill]:
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
    reader: TypeAdapter[Any] = TypeAdapter(Annotated[Killed | SaveKill, Field(discriminator="kind")])
    found: dict[object, Killed | SaveKill] = {}
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


def add_result(path: Path, result: Killed | SaveKill) -> None:
    """Append a result to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")


def kill_part(runs: Sequence[Killed], recorded: Sequence[Killed] = ()) -> Part:
    """The runs of this call, and the sum of those that are ``recorded``."""
    columns = [
        "seed",
        "ranks",
        "controller",
        "kills",
        "restarts",
        "lost",
        "unreadable",
        "left",
        "equal",
        "seconds",
    ]
    table = Table(
        columns, [_kill_row(run) for run in runs], "Kill test", left=("controller", "kills", "equal")
    )
    remarks = [_sum_of_kills("this call", runs)]
    remarks += [_sum_of_kills("all recorded seeds", recorded)] if recorded else []
    for run in runs:
        faults = [*run.unreadable, *(f"differs: {name}" for name in run.differences or ())]
        remarks += [f"seed {run.seed}: {line}" for line in (*faults, *([run.failure] if run.failure else ()))]
    return Part(table, remarks, KILL_NOTES, runs, all(run.sound for run in runs))


def _kill_row(run: Killed) -> tuple[str, ...]:
    kills = ", ".join(
        f"{kill['who']} {kill['signal'].removeprefix('SIG')} {kill['step'] or 'start'}{'*' * kill['writing']}"
        for kill in run.kills
    )
    equal = "no end" if run.failure else "yes" if run.equal else "no"
    counts = (run.restarts, run.lost, len(run.unreadable), run.left)
    ranks = (str(run.seed), str(run.size), run.controller)
    return (*ranks, kills or "-", *map(str, counts), equal, f"{run.seconds:.0f}")


def _sum_of_kills(which: str, runs: Sequence[Killed]) -> str:
    kills = [kill for run in runs for kill in run.kills]
    sizes = ", ".join(
        f"{many} at np={size}" for size, many in sorted(Counter(run.size for run in runs).items())
    )
    signals = ", ".join(
        f"{many} {name}" for name, many in Counter(kill["signal"] for kill in kills).most_common()
    )
    return (
        f"{which}: {sum(run.equal for run in runs)} of {len(runs)} runs ({sizes}) end as the undisturbed run, bit for bit; "
        f"{len(kills)} kills ({signals or '-'}; {sum(kill['writing'] for kill in kills)} while a snapshot was being written), "
        f"{sum(run.restarts for run in runs)} restarts, {sum(run.lost for run in runs)} committed steps lost, "
        f"{sum(len(run.unreadable) for run in runs)} snapshots unreadable, {sum(run.left for run in runs)} processes left"
    )


def save_part(kills: Sequence[SaveKill], recorded: Sequence[SaveKill] = ()) -> Part:
    """The kills of this call by how far the save had come, and the sum of those that are ``recorded``."""
    rows = []
    for phase in PHASES:
        found = [kill for kill in kills if kill.phase == phase]
        counts = [str(sum(kill.writer == writer for kill in found)) for writer in WRITERS]
        rows.append((phase, *counts, _right(found)))
    columns = ("the kill came", *WRITERS, "newest good snapshot right")
    remarks = [f"this call: {_right(kills)} kills within a save left the right newest good snapshot"]
    remarks += [f"all recorded seeds: {_right(recorded)} kills within a save"] if recorded else []
    remarks += [
        f"kill {one.number} of seed {one.seed}, {one.phase}: {one.fault}" for one in kills if one.fault
    ]
    table = Table(columns, rows, "Save test", left=columns[:1])
    return Part(table, remarks, SAVE_NOTES, kills, all(kill.sound for kill in kills))


def _right(kills: Sequence[SaveKill]) -> str:
    return f"{sum(kill.sound for kill in kills)} of {len(kills)}"


def soak_part(soaked: Soaked) -> Part:
    """One row for each measure of each process."""
    rows: list[tuple[str, ...]] = []
    for one in soaked.growth:
        figures = (f"{one.mean:.1f}", f"{one.first:.1f}", f"{one.last:.1f}", f"{one.per_hour:+.2f}")
        rows.append((one.process, one.measure, *figures, "yes" if one.flat else "no"))
    columns = ("process", "measure", "mean", "first", "last", "per hour", "flat")
    size = f"{soaked.seconds / 60:.1f} minutes, {soaked.steps} steps, {soaked.snapshots} snapshots (one every {EVERY} steps)"
    remarks = [size, *([soaked.failure] if soaked.failure else ())]
    table = Table(columns, rows, "Soak", left=("process", "measure", "flat"), folded=1)
    return Part(table, remarks, SOAK_NOTES, soaked, soaked.sound)


def stall_part(rows: Sequence[StallRow]) -> Part:
    """One row for each way of writing."""
    shown: list[tuple[str, ...]] = []
    for row in rows:
        milliseconds, added = f"{row.seconds * 1000:.1f}", f"{row.added * 1000:.0f}"
        shown.append((row.way, f"{row.megabytes:.0f}", milliseconds, f"{row.ratio:.3f}", added))
    columns = ("written by", "MB", "stall ms", "of blocking", "added ms")
    return Part(Table(columns, shown, "Snapshot stall", left=columns[:1]), [], STALL_NOTES, rows, True)
