"""The kill test: runs that are killed and started again, compared with a run that was not.

Each run trains a small LSTM with dropout, tied embeddings, AdamW and two micro-batches on text, or in parts a GPT, and
writes a snapshot every few steps. A run is sound if it ends in the bits of the undisturbed run of as many ranks; if no restart
resumed from before a snapshot that was in place when a signal was sent; if every rank can read every snapshot that was in place
after a kill; and if no process was left.
"""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.checks import differences, newest_good, unreadable
from faults.job import ALL, LAUNCHER, RunView, TrainJob, flags, newest_step, write_text
from notes import Note

STEPS = 60
ELASTIC_STEPS = 300  # so that a rank that has gone can come back
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
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "stages": {"stages": 2},
    "parts": {"tensor": 2},
    "replicas": {"replicas": 4},
    "elastic": {"replicas": 4, "elastic": True},
}
IN_PARTS = {"model": "gpt-tiny", "model-option": ("width=32", "layers=2", "dropout=0.3")}
RUNNING, SNAPSHOT, START = "step", "snapshot", "start"
NUMBER_OF_KILLS = {1: 0.65, 2: 0.3, 3: 0.05}
WHO = {"one": 0.5, ALL: 0.25, LAUNCHER: 0.25}
SIGNALS = {
    "ranks": {"SIGKILL": 0.8, "SIGTERM": 0.1, "SIGINT": 0.1},
    "launcher": {"SIGKILL": 0.5, "SIGTERM": 0.3, "SIGINT": 0.2},
}
WHEN = {RUNNING: 0.6, SNAPSHOT: 0.25, START: 0.15}
LONGEST_START = 6.0  # seconds
LONGEST_DELAY = {RUNNING: 0.1, SNAPSHOT: 0.01, START: 0.0}  # seconds
POLL = 0.003  # seconds
LIMIT = 30.0  # seconds that processes may take to go
SECONDS = 300.0  # of one launch


@dataclass(frozen=True)
class Kill:
    """One signal.

    Attributes:
        who: ``rank 1``, ``all ranks`` or ``launcher``.
        signal: its name.
        when: ``step``: when the log contains the step ``at``; ``snapshot``: when a snapshot is being written at that step or later;
            ``start``: ``at`` seconds after the launch.
        at: a step or seconds.
        delay: seconds after that.
    """

    who: str
    signal: str
    when: str
    at: float
    delay: float


@dataclass(frozen=True)
class FaultPlan:
    """The kills of one run; after each the run is started again.

    Attributes:
        seed: the plan follows from it.
        size: number of ranks.
        controller: starts the ranks.
        layout: of the ranks, one of :data:`LAYOUTS`.
        kills: one for each launch but the last, unless the run ends before.
    """

    seed: int
    size: int
    controller: str
    layout: str
    kills: tuple[Kill, ...]


def draw(seed: int, size: int, controller: str) -> FaultPlan:
    """The plan of a seed."""
    generator = random.Random(seed)
    even, elastic = size % 2 == 0, size > 1 and controller == "gloo"
    fits = {
        "ranks": True,
        "stages": even,
        "parts": even,
        "replicas": not size & (size - 1),
        "elastic": elastic,
    }
    layout = generator.choice(["ranks"] * 3 + [name for name, can in fits.items() if can])
    steps = ELASTIC_STEPS if layout == "elastic" else STEPS

    def one_of(weights: dict[Any, float]) -> Any:
        return generator.choices(list(weights), list(weights.values()))[0]

    def kill(step: int) -> Kill:
        who = one_of(WHO)
        signal = one_of(SIGNALS["launcher" if who == LAUNCHER else "ranks"])
        when = one_of(WHEN)
        at = generator.uniform(0, LONGEST_START) if when == START else step
        rank = generator.randrange(size)
        delay = generator.uniform(0, LONGEST_DELAY[when])
        return Kill(f"rank {rank}" if who == "one" else who, signal, when, round(at, 3), round(delay, 4))

    moments = sorted(generator.sample(range(1, steps), one_of(NUMBER_OF_KILLS)))
    return FaultPlan(seed, size, controller, layout, tuple(kill(step) for step in moments))


@dataclass(frozen=True)
class KillTest:
    """The settings of some runs.

    Attributes:
        folder: for the runs.
        stages: pipeline stages.
        tensor: parts of a layer.
        replicas: logical replicas; each launch then is on another power of two of ranks, and all runs are to end in the same bits.
        elastic: jobs of Horovod Elastic, which a kill of one rank leaves running.
    """

    folder: Path
    stages: int = 1
    tensor: int = 1
    replicas: int | None = None
    elastic: bool = False

    @property
    def steps(self) -> int:
        """Of each run."""
        return ELASTIC_STEPS if self.elastic else STEPS

    @property
    def text(self) -> Path:
        """The text that all runs train on."""
        return self.folder / "text.txt"

    def arguments(self, run: Path) -> list[str]:
        """Of ``hvd-ckpt train`` for the first launch of a run."""
        replicas = {} if self.replicas is None else {"replicas": self.replicas}
        in_parts = {} if self.tensor == 1 else {**IN_PARTS, "tensor": self.tensor}
        settings = {**SETTINGS, **replicas, **in_parts, "steps": self.steps, "pipeline": self.stages}
        return flags({**settings, "commit-every": 5, "data": f"text:{self.text}", "output": run})


@dataclass
class Killed:
    """The result of a run that was killed.

    Attributes:
        kills: those that did not come too late, each with ``who``, ``signal``, ``when``, the last logged ``step`` and the newest
            ``snapshot`` at that time, whether a snapshot was being written (``writing``), and the ``ranks`` of the launch.
        restarts: launches after the first.
        lost: restarts that resumed from before a snapshot that had been in place.
        unreadable: why snapshots in place could not be read.
        left: processes that still ran long after the launcher had ended.
        differences: what differs from the undisturbed run; None if the run did not end.
        failure: why it did not end, in one line.
    """

    kills: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    lost: int = 0
    unreadable: list[str] = field(default_factory=list)
    left: int = 0
    differences: list[str] | None = None
    failure: str | None = None

    @property
    def sound(self) -> bool:
        """Whether it ended as the undisturbed run did, and nothing was lost, unreadable or left."""
        return self.differences == [] and not self.lost and not self.unreadable and not self.left

    @property
    def faults(self) -> list[str]:
        """What is wrong, a line each."""
        lines = [*self.unreadable, *(f"differs: {name}" for name in self.differences or ()), self.failure]
        lines += [f"{self.lost} committed steps lost"] * bool(self.lost)
        lines += [f"{self.left} processes left"] * bool(self.left)
        return [line for line in lines if line]


@functools.cache
def folder() -> Path:
    """Of all runs of this process. It stays where a run is not sound."""
    made = Path(tempfile.mkdtemp(prefix="hvd_ckpt_kills_"))
    atexit.register(lambda: shutil.rmtree(made) if not list(made.glob("*/seed-*")) else None)
    return made


def check(plan: FaultPlan) -> Iterator[str]:
    """What is wrong with the run of a plan."""
    killed = kill_run(KillTest(folder() / plan.layout, **LAYOUTS[plan.layout]), plan)
    yield from killed.faults
    writing = sum(kill["writing"] for kill in killed.kills)
    yield Note(f"seed {plan.seed}, {plan.layout}: {len(killed.kills)} kills, {writing} of them while writing")


def kill_run(test: KillTest, plan: FaultPlan) -> Killed:
    """Runs a fault plan, and compares with an undisturbed run. The folders of sound runs are removed.

    Raises:
        RuntimeError: the undisturbed run failed.
    """
    seed, size, controller = plan.seed, plan.size, plan.controller
    test.folder.mkdir(parents=True, exist_ok=True)
    write_text(test.text)
    # Replicas end in the same bits on any number of ranks; without them, bits depend on ranks and controller.
    sizes = [size] if test.replicas is None else [1 << power for power in range(size.bit_length())]
    reference = test.folder / f"undisturbed-{sizes[0]}-{controller}" / "run"
    if not reference.exists():
        undisturbed = _Course(
            test, FaultPlan(0, sizes[0], controller, plan.layout, ()), reference.parent.name, sizes[:1]
        )
        if (failure := undisturbed.run().failure) is not None:
            raise RuntimeError(f"the undisturbed run of {sizes[0]} ranks over {controller}: {failure}")
    course = _Course(test, plan, f"seed-{seed}-{size}-{controller}", sizes)
    killed = course.run()
    if killed.failure is None:
        own = size if test.replicas is None else None
        killed.differences = differences(course.path, reference, test.steps, own)
    if killed.sound:
        shutil.rmtree(course.folder)
    return killed


class _Course:
    """The launches of one run, on ``sizes`` ranks in turn. Without kills the job is not elastic.

    Attributes:
        killed: the result so far.
        path: the folder of the run.
    """

    def __init__(self, test: KillTest, plan: FaultPlan, name: str, sizes: Sequence[int]) -> None:
        self.folder = test.folder / name
        self.folder.mkdir()
        self.path = self.folder / "run"
        self.killed = Killed()
        self._test, self._plan, self._sizes = test, plan, sizes
        self._kills = list(plan.kills)  # still to come
        self._newest = 0  # the step of the newest snapshot that was seen in place

    def run(self) -> Killed:
        """Launches until the run has ended or failed."""
        for number in range(len(self._plan.kills) + 1):
            self.killed.restarts = number
            if self._launch(number) or self.killed.failure is not None:
                break
        return self.killed

    def _launch(self, number: int) -> bool:
        """One launch; whether the run came to its end."""
        killed, before = self.killed, self._newest
        size = self._sizes[(self._plan.seed + number) % len(self._sizes)]
        resumed = (self.path / "config.yaml").exists()
        arguments = ["--resume", str(self.path)] if resumed else self._test.arguments(self.path)
        view = RunView(self.path)
        elastic = self._test.elastic and bool(self._plan.kills)
        with TrainJob(
            size, self._plan.controller, arguments, self.folder / f"log-{number}.txt", elastic
        ) as job:
            was_killed = self._watch(job, size, view)
            status = job.status
            # Where the time is over the launcher still runs, and so may the others.
            if status is not None:
                killed.left += job.left(LIMIT)
        killed.unreadable += unreadable(self.path, size)
        # Looked at from both sides: where the launch has resumed, and what the next one would resume from.
        first, newest = job.first_step(), newest_good(self.path)
        went_back = first is not None and first - 1 < before
        killed.lost += went_back or newest < self._newest
        if status == 0 and newest == self._test.steps:
            return True
        if status is None:
            killed.failure = f"launch {number + 1}: no end after {SECONDS:.0f} s (log: {job.log_file})"
        elif not was_killed:
            killed.failure = f"launch {number + 1}: status {status}: {job.failure()}"
        self._look()
        return False

    def _watch(self, job: TrainJob, size: int, view: RunView) -> bool:
        """Waits until the launcher has ended or the time is over; whether a kill has happened."""
        start = time.monotonic()
        was_killed, may_be_killed = False, True
        while not job.ended and time.monotonic() - start < SECONDS:
            kill = self._kills[0] if self._kills and may_be_killed else None
            if kill is not None and _due(kill, view, time.monotonic() - start):
                time.sleep(kill.delay)
                # Before the signal: what is in place now must not be lost, and the job may be gone a moment later.
                self._look()
                step, writing = view.last_step(), view.writing()
                if job.send(kill.who, kill.signal):
                    facts = {"who": kill.who, "signal": kill.signal, "when": kill.when, "step": step}
                    self.killed.kills.append(
                        {**facts, "snapshot": self._newest, "writing": writing, "ranks": size}
                    )
                    self._kills.pop(0)
                    was_killed = True
                    # Only an elastic job that has lost one rank lives on, for the next kill to hit it.
                    may_be_killed = (
                        self._test.elastic and kill.who.startswith("rank") and kill.signal == "SIGKILL"
                    )
            self._look()
            time.sleep(POLL)
        return was_killed

    def _look(self) -> None:
        self._newest = max(self._newest, newest_step(self.path))


def _due(kill: Kill, view: RunView, seconds: float) -> bool:
    if kill.when == START:
        return seconds >= kill.at
    return view.last_step() >= kill.at and (kill.when == RUNNING or view.writing())
