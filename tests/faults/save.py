"""The save test: a process that writes snapshots in a loop is killed within a save, and what it leaves is verified.

The writing process is forked from a fork server that has the libraries loaded, so a kill takes a fraction of a second. Writes are
numbered. Their content follows from the number, and every third one replaces the snapshot of the step before. All kills work on
one folder, so the next process finds what the last one has left.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from faults.checks import differing
from notes import Note
from snapshot_files import read_snapshot, state_of
from torch import Tensor

from hvd_ckpt.snapshots import reader
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.writer import SnapshotWriter

WRITERS = ("blocking", "background")
SERIES = 10  # kills
KEEP = 2
SIZES = (1 << 20, 1 << 18, 4099, 1)  # elements of the weights; of the optimizer's state: the first two
AIMED = 4  # one of so many kills comes when the manifest of a save that replaces a snapshot has been written
LAST_PART = 0.2  # of the time of a save
KILLED = (2, 4)  # a kill falls within one of these saves of a process, counted from 0
MANIFEST_SECONDS, HANG = 2.0, 60.0
BEGUN, RETURNED, FAILED = "begun", "returned", "failed"


class SaveError(RuntimeError):
    """The writing process failed; the message says why in one line."""


def draw(seed: int, ranks: int, controller: str) -> int:
    """A series of kills, each by its seed."""
    return seed


def check(seed: int) -> Iterator[str]:
    """What is wrong with what a series of kills leaves."""
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_saves_") as made:
        test = SaveTest(Path(made, "snapshots"), seed)
        kills = [test.kill(number) for number in range(SERIES)]
    yield from (f"kill {number}: {fault}" for number, (_, fault) in enumerate(kills) if fault)
    writing = sum(within for within, _ in kills)
    yield Note(f"seed {seed}: {len(kills)} kills, {writing} of them within a write")


def _content(number: int) -> dict[str, Any]:
    """The state that is saved in the ``number``-th write; every number in it grows from write to write."""
    weights = {f"layer{i}": _numbers(size, number) for i, size in enumerate(SIZES)}
    optimizer = [_numbers(size, 2 * number) for size in SIZES[:2]]
    replicated = {"number": number, "optimizer": optimizer}
    return {"weights": weights, "replicated": replicated, "per_rank": {"number": number}}


def _numbers(size: int, start: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) + start if size < 1 << 19 else torch.arange(size) + start


def _advance(content: dict[str, Any]) -> None:
    """Makes it that of the next write, in place."""
    for tensor in content["weights"].values():
        tensor += 1
    for tensor in content["replicated"]["optimizer"]:
        tensor += 2
    for plain in ("replicated", "per_rank"):
        content[plain] = {**content[plain], "number": content[plain]["number"] + 1}


def step_of(number: int) -> int:
    """The step of a write: every third write replaces the snapshot of the one before."""
    return number - number // 3


def _save(folder: Path, writer: str, number: int, pipe: Connection) -> None:
    """The process that is killed: it writes snapshots until then."""

    def fail(message: str) -> None:
        raise RuntimeError(message)

    try:
        torch.set_num_threads(1)
        content = _content(number)
        token, blocking = os.urandom(4).hex(), writer == WRITERS[0]
        with SnapshotWriter(folder, KEEP, 0, 1, token, fail, blocking) as snapshots:
            while True:
                pipe.send((BEGUN, number, time.monotonic()))
                snapshots.begin(step_of(number), state_of(**content))
                snapshots.before_update()
                _advance(content)  # as soon as the writer allows it, so that a copy taken too late is found
                snapshots.wait()
                pipe.send((RETURNED, number, time.monotonic()))
                number += 1
    except BaseException as error:
        traceback.print_exc()
        pipe.send((FAILED, f"{type(error).__name__}: {error}".splitlines()[0], 0.0))


class SaveTest:
    """Kills processes within their saves to a new folder, at moments that follow from a seed, and checks what each leaves."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self._folder, self._random = folder, random.Random(seed)
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(["torch", "hvd_ckpt.snapshots.writer"])
        self._next = 1  # number of a write
        self._returned = 0  # number of the last write that had returned

    def kill(self, number: int) -> tuple[bool, str | None]:
        """Kills a new process within its third to fifth save; how long the save before it took limits the moment.

        Returns whether that save was not in place yet, and what is wrong with the newest good snapshot, in one line.

        Raises:
            SaveError: the process failed by itself.
        """
        writer = WRITERS[number % len(WRITERS)]
        before = set(os.listdir(self._folder))
        which = self._next + self._random.randint(*KILLED)
        aimed = self._random.randrange(AIMED) == 0
        while aimed and step_of(which) != step_of(which - 1):
            which += 1
        part = self._random.uniform(0, LAST_PART if aimed else 1)
        receiver, sender = self._server.Pipe(duplex=False)
        process = self._server.Process(target=_save, args=(self._folder, writer, self._next, sender))
        process.start()
        sender.close()
        times: dict[str, dict[int, float]] = {BEGUN: {}, RETURNED: {}}  # when each write began and returned
        try:
            while which not in times[BEGUN]:
                if not _read(receiver, times):
                    raise SaveError("the process that saves has ended by itself")
            if aimed:
                self._await_manifest(step_of(which), before)
            time.sleep(part * (times[RETURNED][which - 1] - times[BEGUN][which - 1]))
            process.kill()
            while _read(receiver, times):  # what it still said tells which write was killed
                pass
        finally:
            process.kill()
            process.join()
            receiver.close()
        write = max(times[BEGUN])
        self._returned, self._next = max([self._returned, *times[RETURNED]]), write + 1
        fault, newest = self._newest_good(write)
        return newest != write, fault

    def _await_manifest(self, step: int, before: set[str]) -> None:
        """Returns when the manifest of a step has been written; folders that were there ``before`` are of an earlier process."""
        deadline = time.monotonic() + MANIFEST_SECONDS
        while time.monotonic() < deadline:
            for name in set(os.listdir(self._folder)) - before:
                written = self._folder / name / "manifest.json"
                if name.startswith(f".step-{step:08d}.tmp-") and written.exists():
                    return

    def _newest_good(self, write: int) -> tuple[str | None, int]:
        """The fault of the newest good snapshot, if any, and the number of its write."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = reader.find(self._folder)
                if found is None:
                    return "there is no snapshot", 0
                snapshot = read_snapshot(found.path, 0)
            except SnapshotError as error:
                return str(error), 0
        number = snapshot.replicated["number"]
        if warned:
            return f"a snapshot in place is damaged: {warned[0].message}", number
        if not self._returned <= number <= write:
            return f"it is of write {number}, and write {self._returned} had returned", number
        if snapshot.manifest.step != step_of(number):
            return f"write {number} has step {snapshot.manifest.step} instead of {step_of(number)}", number
        content = _content(number)
        found_in = {part: getattr(snapshot, part) for part in content}
        wrong = next(differing("state", content, found_in), None)
        return wrong and f"write {number} has another {wrong} than was written", number


def _read(pipe: Connection, times: dict[str, dict[int, float]]) -> bool:
    """Waits for a message of the writing process; False if that has ended."""
    try:
        if not pipe.poll(HANG):
            raise SaveError(f"a save has not returned after {HANG:.0f} s")
        event, number, moment = pipe.recv()
    except EOFError:
        return False
    if event == FAILED:
        raise SaveError(f"the process that saves failed: {number}")
    times[event][number] = moment
    return True
