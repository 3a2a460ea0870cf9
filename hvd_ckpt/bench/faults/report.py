"""What the tests found: tables in the terminal, ``report.json`` for programs, ``report.md`` for people."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hvd_ckpt.bench.faults.fit import Line
from hvd_ckpt.bench.faults.kill import Killed
from hvd_ckpt.bench.faults.save import SaveKill
from hvd_ckpt.bench.faults.saver import PHASES, WRITERS
from hvd_ckpt.bench.faults.soak import EVERY, Count, Soaked, Track
from hvd_ckpt.bench.faults.stall import StallRow
from hvd_ckpt.json_file import write_json

__all__ = ["Report", "Section", "kill_section", "save_section", "soak_section", "stall_section"]

TITLE = "Faults"
KILL_COLUMNS = (
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
)
KILL_NOTES = (
    "kills: who got which signal after which step; `start`: before the launch had logged a step, `*`: while a snapshot was being "
    "written; lost: restarts that went on from before a snapshot that had been in place; unreadable: snapshots in place that "
    "cannot be read; left: processes still there 30 s after the launcher had ended.",
    "equal: whether weights, optimizer's state, position in the data, each rank's random state and all logged losses are those of "
    "the undisturbed run of the same ranks and controller, bit for bit.",
)
SAVE_COLUMNS = ("the kill came", *WRITERS, "newest good snapshot right")
SAVE_NOTES = (
    "blocking: snapshot.write and snapshot.prune; background: SnapshotWriter. The moment is uniform within a save; one in four is "
    "aimed at the end of one that replaces a snapshot, from its manifest on.",
    "right: the newest snapshot that loads is whole, has the content of the write it is of, is of no earlier write than the last "
    "that had returned, and nothing in place is damaged.",
)
SOAK_COLUMNS = (
    "process", "memory", "mean MiB", "MiB per hour", "growth MiB", "descriptors", "threads", "flat"
)  # fmt: skip
SOAK_NOTES = (
    "MiB per hour: slope of a line through the means of 12 blocks, with its standard error; the first fifth of the time is left "
    "out.",
    "flat: the slope is at most 3 standard errors above zero or the growth below 1 % of the mean, and descriptors and threads are "
    "no more in the last quarter than in the first (medians: first, last; most).",
)
STALL_COLUMNS = ("written by", "MB", "stall ms", "of snapshot.write", "added ms")
STALL_NOTES = (
    "stall: median time that training stood still for one snapshot; of snapshot.write: median of the ratios within a round; added: "
    "median time by which the steps until the snapshot was on the disk were longer than others, all together.",
)
WANTED_STALL = 0.05  # of the time of a blocking save


@dataclass
class Section:
    """One test's part of the report.

    Attributes:
        title: of the part.
        columns, rows: of its table; the columns ``to_the_left`` hold texts.
        remarks: what came of it, in lines.
        notes: what the columns are.
        result: all of it for programs.
        sound: whether everything held.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str]
    result: dict[str, Any]
    sound: bool
    notes: Sequence[str] = ()
    to_the_left: Sequence[str] = ()


@dataclass
class Report:
    """Everything a call found.

    Attributes:
        command: how to repeat it.
        facts: machine, versions, settings of the environment.
        sections: one for each test.
        seconds: how long it took.
    """

    command: str
    facts: dict[str, str]
    sections: dict[str, Section] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether everything held."""
        return all(section.sound for section in self.sections.values())

    def print(self, console: Console) -> None:
        """Prints the tables and what stands under them."""
        for section in self.sections.values():
            table = Table(title=section.title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
            for name in section.columns:
                table.add_column(name, justify="left" if name in section.to_the_left else "right")
            for row in section.rows:
                table.add_row(*row)
            console.print(table)
            for line in section.remarks:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        for name, value in self._beside().items():
            console.print(f"{name}: {value}", highlight=False, markup=False, soft_wrap=True)

    def save(self, folder: Path) -> None:
        """Writes ``report.json`` and ``report.md`` over those of before."""
        results = {
            name: {**section.result, "sound": section.sound} for name, section in self.sections.items()
        }
        write_json({**self._beside(), "sound": self.sound, **results}, folder / "report.json")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report as a page."""
        lines = [f"# {TITLE}", "", *(f"- {name}: {value}" for name, value in self._beside().items())]
        for section in self.sections.values():
            lines += ["", f"## {section.title}", "", "| " + " | ".join(section.columns) + " |"]
            lines += ["|" + "---|" * len(section.columns)]
            lines += ["| " + " | ".join(row) + " |" for row in section.rows]
            lines += ["", *(f"- {line}" for line in (*section.remarks, *section.notes))]
        return "\n".join([*lines, ""])

    def _beside(self) -> dict[str, str]:
        return {**self.facts, "took": f"{self.seconds:.0f} s", "command": self.command}


# ------------------------------------------------------------------------------------ kill test


def kill_section(
    runs: Sequence[Killed], recorded: Sequence[Killed] = (), fault: str | None = None
) -> Section:
    """The runs of a call, and in sum those that are ``recorded``; ``fault``: why there are no more."""
    remarks = [_kills_in_sum("this call", runs)]
    if recorded:
        remarks.append(_kills_in_sum("all recorded seeds", recorded))
    for run in runs:
        faults = [*run.unreadable, *(f"differs: {name}" for name in run.differences or ())]
        faults += [run.failure] if run.failure else []
        remarks += [f"seed {run.seed}: {line}" for line in faults]
    remarks += [fault] if fault else []
    return Section(
        "Kill test",
        KILL_COLUMNS,
        [_kill_row(run) for run in runs],
        remarks,
        {
            "runs": [dataclasses.asdict(run) for run in runs],
            "recorded": _kill_counts(recorded),
            "fault": fault,
        },
        fault is None and all(run.sound for run in runs),
        KILL_NOTES,
        ("controller", "kills", "equal"),
    )


def _kill_row(run: Killed) -> tuple[str, ...]:
    kills = ", ".join(_kill_in_words(kill) for kill in run.kills)
    counts = (run.restarts, run.lost, len(run.unreadable), run.left)
    equal = "no end" if run.failure else "yes" if run.equal else "no"
    seconds = f"{run.seconds:.0f}"
    return (str(run.seed), str(run.size), run.controller, kills or "-", *map(str, counts), equal, seconds)


def _kill_in_words(kill: dict[str, Any]) -> str:
    moment = f"{kill['step']}{'*' if kill['writing'] else ''}" if kill["step"] else "start"
    return f"{kill['who']} {kill['signal'].removeprefix('SIG')} {moment}"


def _kill_counts(runs: Iterable[Killed]) -> dict[str, Any]:
    runs = list(runs)
    kills = [kill for run in runs for kill in run.kills]
    return {
        "runs": len(runs),
        "by ranks": dict(sorted(Counter(str(run.size) for run in runs).items())),
        "kills": len(kills),
        "by signal": dict(Counter(kill["signal"] for kill in kills).most_common()),
        "by target": dict(Counter(str(kill["who"]).split(" ")[0] for kill in kills).most_common()),
        "while writing": sum(bool(kill["writing"]) for kill in kills),
        "restarts": sum(run.restarts for run in runs),
        "equal": sum(run.equal for run in runs),
        "lost": sum(run.lost for run in runs),
        "unreadable": sum(len(run.unreadable) for run in runs),
        "left": sum(run.left for run in runs),
    }


def _kills_in_sum(which: str, runs: Iterable[Killed]) -> str:
    counts = _kill_counts(runs)
    sizes = ", ".join(f"{number} at np={size}" for size, number in counts["by ranks"].items())
    signals = ", ".join(f"{number} {name}" for name, number in counts["by signal"].items())
    return (
        f"{which}: {counts['equal']} of {counts['runs']} runs ({sizes or 'none'}) end as the undisturbed run, bit for bit; "
        f"{counts['kills']} kills ({signals or 'none'}; {counts['while writing']} while a snapshot was being written), "
        f"{counts['restarts']} restarts, {counts['lost']} committed steps lost, {counts['unreadable']} snapshots unreadable, "
        f"{counts['left']} processes left"
    )


# ------------------------------------------------------------------------------------ save test


def save_section(
    kills: Sequence[SaveKill], recorded: Sequence[SaveKill] = (), fault: str | None = None
) -> Section:
    """The kills of a call by how far the save had come, and in sum those that are ``recorded``."""
    rows = []
    for phase in PHASES:
        of_phase = [kill for kill in kills if kill.phase == phase]
        counts = [sum(kill.writer == writer for kill in of_phase) for writer in WRITERS]
        right = f"{sum(kill.sound for kill in of_phase)} of {len(of_phase)}"
        rows.append((phase, *map(str, counts), right))
    remarks = [_saves_in_sum("this call", kills)]
    if recorded:
        remarks.append(_saves_in_sum("all recorded seeds", recorded))
    remarks += [
        f"kill {one.number} of seed {one.seed}, {one.phase}: {one.fault}" for one in kills if one.fault
    ]
    remarks += [fault] if fault else []
    result = {
        "kills": [dataclasses.asdict(kill) for kill in kills],
        "recorded": {"kills": len(recorded), "right": sum(kill.sound for kill in recorded)},
        "fault": fault,
    }
    sound = fault is None and all(kill.sound for kill in kills)
    return Section("Save test", SAVE_COLUMNS, rows, remarks, result, sound, SAVE_NOTES, (SAVE_COLUMNS[0],))


def _saves_in_sum(which: str, kills: Sequence[SaveKill]) -> str:
    right = sum(kill.sound for kill in kills)
    return f"{which}: {right} of {len(kills)} kills within a save have left the right newest good snapshot"


# ------------------------------------------------------------------------------------ soak


def soak_section(soaked: Soaked) -> Section:
    """Each process, with its two kinds of memory."""
    rows, tracks = [], []
    for track in soaked.tracks:
        counts = [track.count(values) for values in (track.descriptors, track.threads)]
        for kind, values in (("resident", track.resident), ("its own", track.own)):
            line = track.line(values)
            rows.append(_soak_row(track, kind, line, counts))
        tracks.append({**dataclasses.asdict(track), "flat": track.flat})
    remarks = [
        f"{soaked.seconds / 60:.1f} minutes, {soaked.steps} steps, {soaked.snapshots} snapshots (one every {EVERY} steps): "
        + ("all processes flat" if soaked.sound else "not all held")
    ]
    remarks += [soaked.failure] if soaked.failure else []
    result = {
        "seconds": soaked.seconds,
        "steps": soaked.steps,
        "failure": soaked.failure,
        "processes": tracks,
    }
    return Section(
        "Soak", SOAK_COLUMNS, rows, remarks, result, soaked.sound, SOAK_NOTES, ("process", "memory", "flat")
    )


def _soak_row(track: Track, kind: str, line: Line, counts: Sequence[Count]) -> tuple[str, ...]:
    descriptors, threads = (f"{count.first:g}, {count.last:g}; {count.most}" for count in counts)
    flat = line.flat and all(count.flat for count in counts)
    slope = f"{line.slope:+.2f} ± {line.error:.2f}"
    figures = (f"{line.mean:.1f}", slope, f"{line.growth:+.2f}", descriptors, threads)
    return (track.name, kind, *figures, "yes" if flat else "no")


# ------------------------------------------------------------------------------------ stall


def stall_section(rows: Sequence[StallRow]) -> Section:
    """The ways to write; a figure wanted that is not met is no fault."""
    shown = [
        (
            row.way,
            f"{row.megabytes:.0f}",
            f"{row.seconds * 1000:.1f}",
            f"{row.ratio:.3f}",
            f"{row.added * 1000:.0f}",
        )
        for row in rows
    ]
    ours = next(row for row in rows if row.way == "SnapshotWriter")
    met = "met" if ours.ratio <= WANTED_STALL else "not met"
    remark = f"SnapshotWriter: {ours.ratio:.3f} of a blocking save, wanted at most {WANTED_STALL}: {met}"
    result = {"rows": [dataclasses.asdict(row) for row in rows], "wanted": WANTED_STALL}
    return Section(
        "Snapshot stall", STALL_COLUMNS, shown, [remark], result, True, STALL_NOTES, ("written by",)
    )
