"""The save test: a process that writes snapshots in a loop is killed within a save, and what it leaves is verified.

The writing process is forked from a fork server that has the libraries loaded, so a kill takes a fraction of a second. Writes are
numbered. Their content follows from the number, and every third one replaces the snapshot of the step before. All kills work on
one folder, so the next process finds what the last one has left.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hvd_ckpt.bench.faults.checks import differing
from hvd_ckpt.bench.harness.report import Report, Table
from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.writer import SnapshotWriter

WRITERS = ("blocking", "background")
PHASES = (
    "before the first file",
    "files being written",
    "whole, without its name",
    "between two renames",
    "in place",
)
KEEP = 2
SIZES = (1 << 20, 1 << 18, 4099, 1)  # elements of the weights; of the optimizer's state: the first two
AIMED = 4  # one of so many kills comes when the manifest of a save that replaces a snapshot has been written
LAST_PART = 0.2  # of the time of a save
KILLED = (2, 4)  # a kill falls within one of these saves of a process, counted from 0
MANIFEST_SECONDS, HANG = 2.0, 60.0
BEGUN, RETURNED, FAILED = "begun", "returned", "failed"
NOTES = (
    "blocking, background: SnapshotWriter with and without blocking=True. The moment of the kill is uniform within a save; one "
    "in four is aimed at the end of a save that replaces a snapshot, from its manifest on.",
    "right: the newest snapshot that loads is whole, has the content of its write, is of no earlier write than the last that "
    "had returned, and nothing in place is damaged.",
)


class SaveError(Exception):
    """The writing process failed; the message says why in one line."""


@dataclass(frozen=True)
class SaveKill:
    """One kill within a save.

    Attributes:
        seed, number: of the series, and of the kill within it.
        writer: one of :data:`WRITERS`.
        phase: how far the save had come, one of :data:`PHASES`.
        delay: seconds from the start of the save (or from its manifest on) to the kill.
        write: the number of the write that was killed.
        found: the number of the write whose snapshot is the newest good one.
        fault: what is wrong with that snapshot, in one line.
    """

    seed: int
    number: int
    writer: str
    phase: str
    delay: float
    write: int
    found: int
    fault: str | None
    kind: Literal["save"] = "save"


# ------------------------------------------------------------------------------------ the process that is killed


class _Content:
    """The state that is saved; every number in it grows from write to write, of which this is the ``number``-th."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights = {f"layer{i}": _numbers(size, number) for i, size in enumerate(SIZES)}
        self.optimizer = [_numbers(size, 2 * number) for size in SIZES[:2]]

    def next(self) -> None:
        """Become the content of the next write, in place."""
        self.number += 1
        for tensor in self.weights.values():
            tensor += 1
        for tensor in self.optimizer:
            tensor += 2

    def state(self) -> dict[str, Any]:
        """The arguments of a write."""
        replicated = {"number": self.number, "optimizer": self.optimizer}
        return {"weights": self.weights, "replicated": replicated, "per_rank": {"number": self.number}}

    def fault(self, found: reader.Snapshot) -> str | None:
        """How a snapshot differs from this content."""
        if found.step != step_of(self.number):
            return f"write {self.number} has step {found.step} instead of {step_of(self.number)}"
        saved = {"weights": found.weights, "replicated": found.replicated, "per_rank": found.per_rank}
        wrong = next(differing("state", self.state(), saved), None)
        return wrong and f"write {self.number} has another {wrong} than was written"


def _numbers(size: int, start: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) + start if size < 1 << 19 else torch.arange(size) + start


def step_of(number: int) -> int:
    """The step of a write."""
    return number - number // 3


def _save(folder: Path, writer: str, number: int, pipe: Connection) -> None:
    """Write snapshots until the process is killed."""

    def fail(message: str) -> None:
        raise RuntimeError(message)

    try:
        torch.set_num_threads(1)
        content = _Content(number)
        how = {"rank": 0, "ranks": 1, "warn": fail, "blocking": writer == WRITERS[0]}
        with SnapshotWriter(folder, KEEP, os.urandom(4).hex(), **how) as snapshots:  # type: ignore[arg-type]
            while True:
                written = content.number
                pipe.send((BEGUN, written, time.monotonic()))
                snapshots.begin(step_of(written), **content.state())
                snapshots.before_update()
                content.next()
                snapshots.wait()
                pipe.send((RETURNED, written, time.monotonic()))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((FAILED, f"{type(error).__name__}: {error}".splitlines()[0], 0.0))


# ------------------------------------------------------------------------------------ the process that kills


def save_kills(folder: Path, saves: int, seed: int) -> Iterator[SaveKill]:
    """Kill a process ``saves`` times within its saves, the writers in turn.

    Args:
        folder: for the snapshots; created here.

    Raises:
        SaveError: the writing process failed.
    """
    folder.mkdir(parents=True)
    killer = _Killer(folder, seed)
    for number in range(saves):
        yield killer.kill(number, WRITERS[number % len(WRITERS)])


class _Killer:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.random = folder, seed, random.Random(seed)
        self.server = multiprocessing.get_context("forkserver")
        self.server.set_forkserver_preload([__name__])
        self.number = 1  # of the next write
        self.returned = 0

    def kill(self, number: int, writer: str) -> SaveKill:
        """Kill a new process within its third to fifth save, at a moment that the time of the save before it limits."""
        before = set(os.listdir(self.folder))
        which = self.number + self.random.randint(*KILLED)
        aimed = self.random.randrange(AIMED) == 0
        while aimed and step_of(which) != step_of(which - 1):
            which += 1
        part = self.random.uniform(0, LAST_PART if aimed else 1)
        receiver, sender = self.server.Pipe(duplex=False)
        process = self.server.Process(target=_save, args=(self.folder, writer, self.number, sender))
        process.start()
        sender.close()
        told: dict[str, dict[int, float]] = {BEGUN: {}, RETURNED: {}}  # when each write began and returned
        try:
            while which not in told[BEGUN]:
                if not _read(receiver, told):
                    raise SaveError("the process that saves has ended by itself")
            if aimed:
                self._await_manifest(step_of(which), before)
            delay = part * (told[RETURNED][which - 1] - told[BEGUN][which - 1])
            time.sleep(delay)
            process.kill()
            while _read(receiver, told):
                pass
        finally:
            process.kill()
            process.join()
            receiver.close()
        write = max(told[BEGUN])
        self.returned = max([self.returned, *told[RETURNED]])
        self.number = write + 1
        fault, found = self._left(write)
        phase = self._phase(set(os.listdir(self.folder)) - before, step_of(write), found == write)
        return SaveKill(self.seed, number, writer, phase, delay, write, found, fault)

    def _await_manifest(self, step: int, before: set[str]) -> None:
        """Return when the manifest of a step has been written; folders that were there ``before`` are of an earlier process."""
        deadline = time.monotonic() + MANIFEST_SECONDS
        while time.monotonic() < deadline:
            for name in set(os.listdir(self.folder)) - before:
                written = self.folder / name / "manifest.json"
                if name.startswith(f".step-{step:08d}.tmp-") and written.exists():
                    return

    def _phase(self, new: set[str], step: int, in_place: bool) -> str:
        """How far the write of a step had come, from the names that it added to the folder."""
        if in_place:
            return PHASES[4]
        if any(name.startswith(f".step-{step:08d}.old-") for name in new):
            return PHASES[3]
        folders = [self.folder / name for name in new if name.startswith(f".step-{step:08d}.tmp-")]
        written = [name for folder in folders for name in os.listdir(folder)]
        return PHASES[2] if "manifest.json" in written else PHASES[1] if written else PHASES[0]

    def _left(self, write: int) -> tuple[str | None, int]:
        """The fault of the newest good snapshot, if any, and the number of its write."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                path = reader.find(self.folder)
                if path is None:
                    return "there is no snapshot", 0
                found = reader.read(path, 0)
            except SnapshotError as error:
                return str(error), 0
        number = found.replicated["number"]
        if warned:
            return f"a snapshot in place is damaged: {warned[0].message}", number
        if not self.returned <= number <= write:
            return f"it is of write {number}, and write {self.returned} had returned", number
        return _Content(number).fault(found), number


def _read(pipe: Connection, told: dict[str, dict[int, float]]) -> bool:
    """Waits for a message of the writing process; False if that has ended."""
    try:
        if not pipe.poll(HANG):
            raise SaveError(f"a save has not returned after {HANG:.0f} s")
        what, number, moment = pipe.recv()
    except EOFError:
        return False
    if what == FAILED:
        raise SaveError(f"the process that saves failed: {number}")
    told[what][number] = moment
    return True


def save_report(kills: Sequence[SaveKill], recorded: Sequence[SaveKill] = ()) -> Report:
    """The kills of this call by how far the save had come, and the sum of those that are ``recorded``."""
    rows = []
    for phase in PHASES:
        found = [kill for kill in kills if kill.phase == phase]
        counts = [str(sum(kill.writer == writer for kill in found)) for writer in WRITERS]
        rows.append((phase, *counts, _right(found)))
    columns = ("the kill came", *WRITERS, "newest good snapshot right")
    remarks = [f"this call: {_right(kills)} kills within a save left the right newest good snapshot"]
    remarks += [f"all recorded seeds: {_right(recorded)} kills within a save"] if recorded else []
    faulty = [kill for kill in kills if kill.fault]
    remarks += [f"kill {one.number} of seed {one.seed}, {one.phase}: {one.fault}" for one in faulty]
    table = Table(columns, rows, "Save test", left=columns[:1])
    return Report("Save test", {}, [table], kills, remarks, NOTES, success=not faulty)


def _right(kills: Sequence[SaveKill]) -> str:
    return f"{sum(kill.fault is None for kill in kills)} of {len(kills)}"
