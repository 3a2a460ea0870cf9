"""The kill test: runs that are killed and started again, compared with a run that was not.

Each run trains a small LSTM with dropout, tied embeddings, AdamW and two micro-batches on text, and writes a snapshot every few
steps. A run is sound if it ends in the bits of the undisturbed run of as many ranks; if no restart resumed from before a snapshot
that was in place when a signal was sent; if every rank can read every snapshot that was in place after a kill; and if no process
was left.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvd_ckpt.bench.faults.checks import differences, newest_good, unreadable
from hvd_ckpt.bench.faults.job import RunView, TrainJob, newest_step
from hvd_ckpt.bench.faults.plan import RUNNING, START, FaultPlan, Kill, draw_plan

__all__ = ["STEPS", "JobError", "Killed", "disturbed_run", "kill_runs", "undisturbed_run", "write_text"]

STEPS = 60
SETTINGS = {
    "model": "lstm-small",
    "model-option": ("width=64", "dropout=0.3", "tied=true"),
    "sequence-length": 16,
    "batch": 4,
    "accumulate": 2,
    "optimizer": "adamw",
    "lr": 3e-3,
    "validation-split": 0,
    "log-every": 2,
    "snapshot-every": 3,
    "keep-snapshots": 3,
    "steps": STEPS,
}
POLL = 0.003  # seconds
LIMIT = 30.0  # seconds that processes may take to go


class JobError(Exception):
    """The undisturbed run failed; the message says why in one line."""


@dataclass
class Killed:
    """The result of a run that was killed.

    Attributes:
        seed, size, controller: of its :class:`FaultPlan`.
        kills: each with ``who``, ``signal``, ``when``, the last logged ``step`` and the newest ``snapshot`` at that time, and
            whether a snapshot was being written (``writing``); kills that came too late are left out.
        restarts: launches after the first.
        lost: restarts that resumed from before a snapshot that had been in place.
        unreadable: why snapshots in place could not be read.
        left: processes that still ran long after the launcher had ended.
        differences: what differs from the undisturbed run; None if the run did not end.
        failure: why it did not end, in one line.
        seconds: duration.
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
    kind: Literal["kill"] = "kill"

    @property
    def equal(self) -> bool:
        """Whether it ended as the undisturbed run did."""
        return self.differences == []

    @property
    def sound(self) -> bool:
        """Whether it ended as the undisturbed run did, and nothing was lost, unreadable or left."""
        return self.equal and not self.lost and not self.unreadable and not self.left


def kill_runs(
    seeds: range, sizes: list[int], controllers: list[str], folder: Path, timeout: float
) -> Iterator[Killed]:
    """Run the fault plan of each seed. The folders of sound runs are removed.

    Args:
        folder: for the runs; created here.
        timeout: seconds for one launch.

    Raises:
        JobError: an undisturbed run failed.
    """
    folder.mkdir()
    text = write_text(folder)
    references: dict[tuple[int, str], Path] = {}
    for seed in seeds:
        plan = draw_plan(seed, sizes, controllers, STEPS)
        ranks = (plan.size, plan.controller)
        if ranks not in references:
            place = folder / f"undisturbed-{plan.size}-{plan.controller}"
            references[ranks] = undisturbed_run(*ranks, text, place, timeout)
        killed = disturbed_run(plan, text, references[ranks], folder / f"seed-{seed}", timeout)
        if killed.sound:
            shutil.rmtree(folder / f"seed-{seed}")
        yield killed


def write_text(folder: Path) -> Path:
    """The text that all runs train on."""
    path = folder / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def undisturbed_run(size: int, controller: str, text: Path, folder: Path, timeout: float) -> Path:
    """Train to the end; returns the folder of the run.

    Raises:
        JobError: the run failed.
    """
    course = _Course(FaultPlan(0, size, controller, ()), text, folder, timeout)
    if course.run().failure is not None:
        raise JobError(f"the undisturbed run of {size} ranks over {controller}: {course.killed.failure}")
    return course.path


def disturbed_run(plan: FaultPlan, text: Path, reference: Path, folder: Path, timeout: float) -> Killed:
    """Train to the end with the plan's kills, each followed by a restart, and compare with the run ``reference``.

    Args:
        timeout: seconds for one launch.
    """
    start = time.monotonic()
    course = _Course(plan, text, folder, timeout)
    killed = course.run()
    if killed.failure is None:
        killed.differences = differences(course.path, reference, STEPS, plan.size)
    killed.seconds = round(time.monotonic() - start, 1)
    return killed


class _Course:
    """The launches of one run.

    Attributes:
        killed: the result so far.
        committed: the step of the newest snapshot that was seen in place.
    """

    def __init__(self, plan: FaultPlan, text: Path, folder: Path, timeout: float) -> None:
        folder.mkdir(parents=True)
        self.plan, self.text, self.folder, self.timeout = plan, text, folder, timeout
        self.killed = Killed(plan.seed, plan.size, plan.controller)
        self.path = folder / "run"
        self.committed = 0

    def run(self) -> Killed:
        """Launch until the run has ended or failed."""
        for number, kill in enumerate([*self.plan.kills, None]):
            self.killed.restarts = number
            if self._launch(number, kill) or self.killed.failure is not None:
                break
        return self.killed

    def _launch(self, number: int, kill: Kill | None) -> bool:
        """One launch; whether the run came to its end."""
        killed, before = self.killed, self.committed
        resumed = (self.path / "config.yaml").exists()
        arguments = ["--resume", str(self.path)] if resumed else _arguments(self.text, self.path)
        log_file = self.folder / f"log-{number}.txt"
        view = RunView(self.path)
        with TrainJob(self.plan.size, self.plan.controller, arguments, log_file) as job:
            happened = self._watch(job, kill, view)
            status = job.status
            if status is not None:
                killed.left += job.left(LIMIT)
        killed.unreadable += unreadable(self.path, self.plan.size)
        first = job.first_step()
        went_back = first is not None and first - 1 < before
        killed.lost += went_back or newest_good(self.path) < self.committed
        if status == 0 and newest_good(self.path) == STEPS:
            return True
        if status is None:
            killed.failure = f"launch {number + 1}: no end after {self.timeout:.0f} s (log: {log_file})"
        elif not happened:
            killed.failure = f"launch {number + 1}: status {status}: {job.last_words()} (log: {log_file})"
        self._look()
        return False

    def _watch(self, job: TrainJob, kill: Kill | None, view: RunView) -> bool:
        """Wait until the launcher has ended or the time is over; whether the kill has happened."""
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
                happened = job.send(kill.who, kill.signal, self.plan.size)
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
