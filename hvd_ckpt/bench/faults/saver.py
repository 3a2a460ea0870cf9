"""The process of the save test: it forks one that saves in a loop, kills it within a save, and looks at what is left.

Run as ``python -m hvd_ckpt.bench.faults.saver FOLDER SAVES SEED``; prints a line of JSON for each kill. A process of its own,
so that every fork has the libraries loaded and nothing else: a kill takes a fraction of a second.

Writes are numbered. Their content follows from the number, and every third one replaces the snapshot of the step before. All kills
work on one folder, so the next process finds what the last one has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.snapshots import snapshot
from hvd_ckpt.snapshots.manifest import MANIFEST
from hvd_ckpt.snapshots.snapshot_folder import name_of, names_in

__all__ = ["PHASES", "WRITERS", "Content", "phase_of", "step_of"]

WRITERS = ("blocking", "background")
PHASES = (
    "before the first file",
    "files being written",
    "whole, without its name",
    "between two renames",
    "in place, not yet told",
    "older ones being removed",
)
KEEP = 2
SIZES = (
    1 << 20,
    1 << 18,
    4099,
    1,
)  # elements of the weights; the optimizer's state has as many as the first two
MEASURED = 7  # saves, to know how long one takes
AIMED = 4  # one of so many kills comes when the manifest of a save that replaces one is there
LAST_PART = 0.2  # of the time of a save
LAST_SAVE = 3  # a kill falls within one of so many saves of a process
HANG = 60.0  # seconds
BEGUN, RETURNED, PRUNED = "begun", "returned", "pruned"


class Content:
    """The state that is saved; every number of it grows by one from write to write.

    Args:
        number: of the first write.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights = {f"layer{i}": _numbers(size, number) for i, size in enumerate(SIZES)}
        self.optimizer = [_numbers(size, 2 * number) for size in SIZES[:2]]

    def next(self) -> None:
        """Becomes that of the next write, in place."""
        self.number += 1
        for tensor in self.weights.values():
            tensor += 1
        for tensor in self.optimizer:
            tensor += 2

    def parts(self) -> dict[str, Any]:
        """The arguments of a write."""
        common = {"number": self.number, "optimizer": self.optimizer}
        return {"weights": self.weights, "common": common, "own": {"number": self.number}}

    def fault(self, found: snapshot.Snapshot) -> str | None:
        """What of a snapshot is not of this content."""
        if found.step != step_of(self.number):
            return f"write {self.number} has step {found.step} instead of {step_of(self.number)}"
        if found.own != {"number": self.number}:
            return f"write {self.number} has the own part {str(found.own)[:60]}"
        state = [*self.weights.values(), *self.optimizer]
        saved = [*found.weights.values(), *found.common["optimizer"]]
        wrong = [
            number for number, (one, other) in enumerate(zip(state, saved)) if not torch.equal(one, other)
        ]
        if found.weights.keys() != self.weights.keys() or len(saved) != len(state) or wrong:
            return f"write {self.number} has other tensors than were written: {wrong}"
        return None


def _numbers(size: int, start: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) + start if size < 1 << 19 else torch.arange(size) + start


def step_of(number: int) -> int:
    """The step that a write is of."""
    return number - number // 3


def phase_of(
    names: set[str], files: Callable[[str], list[str]], step: int, in_place: bool, told: bool
) -> str:
    """How far a write of ``step`` had come.

    Args:
        names: what is new in the folder of snapshots.
        files: names of the files in a folder of it.
        in_place: whether its snapshot is there.
        told: whether it has returned.
    """
    if told:
        return PHASES[5]
    if in_place:
        return PHASES[4]
    temporary = [name for name in names if name.startswith(f".{name_of(step)}.tmp-")]
    if any(name.startswith(f".{name_of(step)}.old-") for name in names):
        return PHASES[3]
    written = [name for folder in temporary for name in files(folder)]
    return PHASES[2] if MANIFEST in written else PHASES[1] if written else PHASES[0]


# ------------------------------------------------------------------------------------ the process that is killed


def _save(folder: Path, writer: str, number: int, tell: Callable[[str, int], None]) -> None:
    content = Content(number)
    if writer == WRITERS[0]:
        while True:
            tell(BEGUN, content.number)
            snapshot.write(folder, step_of(content.number), **content.parts())
            tell(RETURNED, content.number)
            snapshot.prune(folder, KEEP)
            tell(PRUNED, content.number)
            content.next()
    from hvd_ckpt.snapshots.background import SnapshotWriter

    token = os.urandom(4).hex()
    with SnapshotWriter(folder, KEEP, token, rank=0, ranks=1, warn=_fail) as background:
        while True:
            written = content.number
            tell(BEGUN, written)
            background.begin(step_of(written), **content.parts())
            background.before_update()
            content.next()
            background.wait()
            tell(RETURNED, written)
            tell(PRUNED, written)


def _fail(message: str) -> None:
    raise RuntimeError(message)


def _child(folder: Path, writer: str, number: int, pipe: int) -> None:
    def tell(what: str, of: int) -> None:
        os.write(pipe, f"{what} {of} {time.monotonic()}\n".encode())

    try:
        _save(folder, writer, number, tell)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# ------------------------------------------------------------------------------------ the one that kills


@dataclass
class _Told:
    """What a process that saves has told; the numbers are of writes.

    Attributes:
        begun, returned, pruned: when each was.
    """

    begun: dict[int, float] = field(default_factory=dict)
    returned: dict[int, float] = field(default_factory=dict)
    pruned: dict[int, float] = field(default_factory=dict)
    open: bool = True
    _rest: bytes = b""

    def read(self, pipe: int) -> None:
        """Takes what is in the pipe; waits for something."""
        if not select.select([pipe], [], [], HANG)[0]:
            raise RuntimeError(f"a save has not come to an end in {HANG:.0f} s")
        content = os.read(pipe, 1 << 16)
        self.open = bool(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            what, number, moment = line.decode().split()
            getattr(self, what)[int(number)] = float(moment)


class _Killer:
    def __init__(self, folder: Path, seed: int, writers: tuple[str, ...]) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.number = 1  # of the next write
        self.returned = 0
        self.durations = {writer: self._measured(writer) for writer in writers}

    def kill(self, writer: str) -> dict[str, Any]:
        before = set(names_in(self.folder))
        which = self.number + self.random.randrange(LAST_SAVE)
        longest = statistics.median(self.durations[writer])
        if self.random.randrange(AIMED) == 0:
            while step_of(which) != step_of(which - 1):
                which += 1
            delay = self.random.uniform(0, LAST_PART * longest)
            told = self._run(writer, lambda told: which in told.begun, delay, before, step_of(which))
        else:
            delay = self.random.uniform(0, longest)
            told = self._run(writer, lambda told: which in told.begun, delay)
        under_way = max(told.begun, default=self.number)
        self.durations[writer] += _durations(told)
        self.returned = max([self.returned, *told.returned])
        fault, found = self._left(under_way)
        phase = phase_of(
            set(names_in(self.folder)) - before,
            lambda name: names_in(self.folder / name),
            step_of(under_way),
            found == under_way,
            under_way in told.returned,
        )
        self.number = under_way + 1
        return {
            "writer": writer,
            "phase": phase,
            "delay": delay,
            "write": under_way,
            "found": found,
            "fault": fault,
        }

    def _measured(self, writer: str) -> list[float]:
        last = self.number + MEASURED
        told = self._run(writer, lambda told: last in told.pruned, 0)
        self.number = max(told.begun) + 1
        self.returned = max(told.returned)
        return _durations(told)[1:]

    def _run(
        self,
        writer: str,
        reached: Callable[[_Told], bool],
        delay: float,
        before: set[str] | None = None,
        step: int = 0,
    ) -> _Told:
        """Kills a process ``delay`` seconds after it has told what is wanted or, with ``before``, when the manifest of ``step`` is
        there then.
        """
        with _saving(self.folder, writer, self.number) as (pid, pipe):
            told = _Told()
            while told.open and not reached(told):
                told.read(pipe)
            if before is not None:
                self._await_manifest(step, before, 10 * statistics.median(self.durations[writer]))
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            while told.open:
                told.read(pipe)
        if not reached(told):
            raise RuntimeError("the process that saves has ended by itself")
        return told

    def _await_manifest(self, step: int, before: set[str], limit: float) -> None:
        """Names that were there ``before`` are of an earlier process."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for name in set(names_in(self.folder)) - before:
                if name.startswith(f".{name_of(step)}.tmp-") and (self.folder / name / MANIFEST).exists():
                    return

    def _left(self, under_way: int) -> tuple[str | None, int]:
        """What is wrong with the newest good snapshot, and the number of its write."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                path = snapshot.find(self.folder)
                if path is None:
                    return "there is no snapshot", 0
                found = snapshot.read(path, 0)
            except snapshot.SnapshotError as error:
                return str(error), 0
        number = found.common["number"]
        if warned:
            return f"a snapshot in place is damaged: {warned[0].message}", number
        if not self.returned <= number <= under_way:
            return f"it is of write {number}, and write {self.returned} had returned", number
        return Content(number).fault(found), number


def _durations(told: _Told) -> list[float]:
    return [end - told.begun[number] for number, end in told.pruned.items()]


@contextlib.contextmanager
def _saving(folder: Path, writer: str, number: int) -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(folder, writer, number, writing)
    os.close(writing)
    try:
        yield pid, reading
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def main(folder: str, saves: int, seed: int) -> None:
    """Kills ``saves`` times, the ways to write in turn."""
    torch.set_num_threads(1)  # a fork of a process with more hangs
    killer = _Killer(Path(folder), seed, WRITERS)
    for number in range(saves):
        print(json.dumps(killer.kill(WRITERS[number % len(WRITERS)])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
