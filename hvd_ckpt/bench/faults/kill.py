"""The kill test: runs that are killed and started again, beside one that nobody disturbs.

Each run trains a small LSTM with dropout, tied embeddings, AdamW and two micro-batches on text, and writes a snapshot every few
steps. A run is right if it ends with what the undisturbed run of the same number of ranks ends with, bit for bit; if no restart
went on from before a snapshot that had been in place when a signal was sent; if every snapshot that was in place after
a kill can be read by every rank; and if no process was left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ckpt.bench.faults.drawing import RUNNING, START, Disturbance, Kill
from hvd_ckpt.bench.faults.job import RunView, TrainJob, newest_step
from hvd_ckpt.bench.faults.judging import differences, newest_good, unreadable

__all__ = ["STEPS", "JobError", "Killed", "disturbed_run", "undisturbed_run", "write_text"]

STEPS = 60
SETTINGS = {
    "model": "lstm-small",
    "model-option": ("width=64", "dropout=0.3", "tied=true"),
    "length": 16,
    "batch": 4,
    "accumulate": 2,
    "optimizer": "adamw",
    "lr": 3e-3,
    "held-out": 0,
    "log-every": 2,
    "snapshot-every": 3,
    "keep-snapshots": 3,
    "steps": STEPS,
}
POLL = 0.003  # seconds
LIMIT = 30.0  # seconds that processes may take to go


class JobError(Exception):
    """The undisturbed run did not come to its end; the message says why in one line."""


@dataclass
class Killed:
    """What became of a run.

    Attributes:
        seed, size, controller: of its :class:`Disturbance`.
        kills: each with ``who``, ``signal``, ``when``, the last logged ``step`` and the newest ``snapshot`` at that time, and the
            ``writing`` of a snapshot; kills that came too late are not among them.
        restarts: launches after the first.
        lost: restarts that went on from before a snapshot that had been in place.
        unreadable: why snapshots in place could not be read.
        left: processes that were still there long after the launcher had ended.
        differences: what differs from the undisturbed run; None if the run came to no end.
        failure: why it did not, in one line.
        seconds: that it took.
    """

    seed: int
    size: int
    controller: str
    kills: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    lost: int = 0
    unreadable: list[str] = field(default_factory=list)
    left: int = 0
    differences: list[str] | None = None
    failure: str | None = None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether it ended as the undisturbed run did."""
        return self.differences == []

    @property
    def sound(self) -> bool:
        """Whether nothing was lost, unreadable, left or different."""
        return self.equal and not self.lost and not self.unreadable and not self.left


def write_text(folder: Path) -> Path:
    """The text that all runs train on."""
    path = folder / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def undisturbed_run(size: int, controller: str, text: Path, folder: Path, timeout: float) -> Path:
    """Trains to the end; the folder of the run.

    Raises:
        JobError: it came to none.
    """
    folder.mkdir(parents=True)
    run = folder / "run"
    deadline = time.monotonic() + timeout
    with TrainJob(size, controller, _arguments(text, run), folder / "log-0.txt") as job:
        while not job.ended and time.monotonic() < deadline:
            time.sleep(POLL)
        status = job.process.poll()
    if status != 0 or newest_step(run) != STEPS:
        what = f"no end after {timeout:.0f} s" if status is None else f"status {status}: {job.last_words()}"
        raise JobError(f"the undisturbed run of {size} ranks over {controller}: {what} (log: {job.log_file})")
    return run


def disturbed_run(
    disturbance: Disturbance, text: Path, reference: Path, folder: Path, timeout: float
) -> Killed:
    """Trains to the end with the kills, each followed by a restart, and compares with the run ``reference``.

    Args:
        timeout: seconds for one launch.
    """
    folder.mkdir(parents=True)
    start = time.monotonic()
    killed = Killed(disturbance.seed, disturbance.size, disturbance.controller)
    _Course(disturbance, killed, text, folder, timeout).run()
    if killed.failure is None:
        killed.differences = differences(folder / "run", reference, STEPS, disturbance.size)
    killed.seconds = round(time.monotonic() - start, 1)
    return killed


class _Course:
    """The launches of one run, with what is known between them.

    Attributes:
        committed: the step of the newest snapshot that was seen in place.
    """

    def __init__(
        self, disturbance: Disturbance, killed: Killed, text: Path, folder: Path, timeout: float
    ) -> None:
        self.disturbance, self.killed, self.text, self.folder = disturbance, killed, text, folder
        self.timeout = timeout
        self.path = folder / "run"
        self.committed = 0

    def run(self) -> None:
        kills = list(self.disturbance.kills)
        for number in range(len(kills) + 1):
            self.killed.restarts = number
            done = self._launch(number, kills[number] if number < len(kills) else None)
            if done or self.killed.failure is not None:
                return

    def _launch(self, number: int, kill: Kill | None) -> bool:
        """Whether the run came to its end."""
        killed, size = self.killed, self.disturbance.size
        resumed = (self.path / "config.yaml").exists()
        arguments = ["--resume", str(self.path)] if resumed else _arguments(self.text, self.path)
        before = self.committed
        log_file = self.folder / f"log-{number}.txt"
        view = RunView(self.path)
        with TrainJob(size, self.disturbance.controller, arguments, log_file) as job:
            happened = self._watch(job, kill, view)
            status = job.process.poll()
            if status is not None:
                killed.left += len(job.left(LIMIT))
        killed.unreadable += unreadable(self.path, size)
        first = job.first_step()
        went_back = first is not None and first - 1 < before
        killed.lost += went_back or newest_good(self.path) < self.committed
        if status == 0 and newest_good(self.path) == STEPS:
            return True
        if status is None:
            killed.failure = f"launch {number + 1}: no end after {self.timeout:.0f} s (log: {log_file})"
        elif not happened:
            killed.failure = f"launch {number + 1}: status {status}: {job.last_words()} (log: {log_file})"
        self.committed = max(self.committed, newest_step(self.path))
        return False

    def _watch(self, job: TrainJob, kill: Kill | None, view: RunView) -> bool:
        """Waits until the launcher ends or the time is over; whether the kill has happened."""
        start = time.monotonic()
        happened = False
        while not job.ended and time.monotonic() - start < self.timeout:
            if kill is not None and not happened and _due(kill, view, time.monotonic() - start):
                time.sleep(kill.delay)
                self._look()
                facts = {
                    "who": kill.who,
                    "signal": kill.signal,
                    "when": kill.when,
                    "step": view.last_step(),
                    "snapshot": self.committed,
                    "writing": view.writing(),
                }
                happened = job.send(kill.who, kill.signal, self.disturbance.size)
                if happened:
                    self.killed.kills.append(facts)
            self._look()
            time.sleep(POLL)
        return happened

    def _look(self) -> None:
        self.committed = max(self.committed, newest_step(self.path))


def _due(kill: Kill, view: RunView, seconds: float) -> bool:
    if kill.when == START:
        return seconds >= kill.at
    return view.last_step() >= kill.at and (kill.when == RUNNING or view.writing())


def _arguments(text: Path, run: Path) -> list[str]:
    arguments = []
    for name, value in {**SETTINGS, "text": text, "output": run}.items():
        for one in value if isinstance(value, tuple) else (value,):
            arguments += [f"--{name}", str(one)]
    return arguments
