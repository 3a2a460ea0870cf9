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
from pathlib import Path
from typing import Any, NamedTuple

from faults.checks import differences, newest_good, unreadable
from faults.job import ALL, LAUNCHER, RunView, TrainJob, flags, newest_step, write_text
from notes import Note

SETTINGS: dict[str, Any] = {
    "model": "lstm-small",
    "model-option": ("width=64", "dropout=0.3", "tied=true"),
    "sequence-length": 16,
    "batch": 4,
    "accumulate": 2,
    "optimizer": "adamw",
    "lr": 3e-3,
    "validation-split": 0,
    "log-every": 2,
    "steps": 60,
    "snapshot-every": 3,
    "keep-snapshots": 3,
    "commit-every": 5,
}
LAYOUTS: dict[str, dict[str, Any]] = {  # further settings
    "ranks": {},
    "stages": {"pipeline": 2},
    "parts": {"tensor": 2, "model": "gpt-tiny", "model-option": ("width=32", "layers=2", "dropout=0.3")},
    "replicas": {"replicas": 4},
    "elastic": {"replicas": 4, "steps": 300},  # so that a rank that has gone can come back
}
RUNNING, SNAPSHOT, START = "step", "snapshot", "start"
NUMBER_OF_KILLS = {1: 0.65, 2: 0.3, 3: 0.05}
WHO = {"one": 0.5, ALL: 0.25, LAUNCHER: 0.25}
SIGNALS = {"SIGKILL": 0.8, "SIGTERM": 0.1, "SIGINT": 0.1}  # for ranks
SIGNALS_TO_LAUNCHER = {"SIGKILL": 0.5, "SIGTERM": 0.3, "SIGINT": 0.2}
WHEN = {RUNNING: 0.6, SNAPSHOT: 0.25, START: 0.15}
LONGEST_START = 6.0  # seconds
LONGEST_DELAY = {RUNNING: 0.1, SNAPSHOT: 0.01, START: 0.0}  # seconds
POLL = 0.003  # seconds
LIMIT = 30.0  # seconds that processes may take to go
SECONDS = 300.0  # of one launch


class Kill(NamedTuple):
    """One signal."""

    who: str  # ``rank 1``, ``all ranks`` or ``launcher``
    signal: str
    # ``step``: when the log contains the step ``at``; ``snapshot``: when a snapshot is being written at that step or later;
    # ``start``: ``at`` seconds after the launch.
    when: str
    at: float
    delay: float  # seconds after that


class FaultPlan(NamedTuple):
    """The kills of one run, one for each launch but the last, unless the run ends before; after each it is started again."""

    seed: int
    size: int  # ranks
    controller: str
    layout: str
    kills: tuple[Kill, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the run."""
        return {**SETTINGS, **LAYOUTS[self.layout]}


def draw(seed: int, size: int, controller: str) -> FaultPlan:
    """The plan of a seed."""
    generator = random.Random(seed)
    layouts = ["ranks"] * 4 + ["stages", "parts"] * (size % 2 == 0)
    layouts += ["replicas"] * (not size & (size - 1)) + ["elastic"] * (size > 1 and controller == "gloo")
    layout = generator.choice(layouts)

    def one_of(weights: dict[Any, float]) -> Any:
        return generator.choices(list(weights), list(weights.values()))[0]

    def kill(step: int) -> Kill:
        who = one_of(WHO)
        signal = one_of(SIGNALS_TO_LAUNCHER if who == LAUNCHER else SIGNALS)
        when = one_of(WHEN)
        at = generator.uniform(0, LONGEST_START) if when == START else step
        rank = generator.randrange(size)
        delay = generator.uniform(0, LONGEST_DELAY[when])
        return Kill(f"rank {rank}" if who == "one" else who, signal, when, round(at, 3), round(delay, 4))

    plan = FaultPlan(seed, size, controller, layout, ())
    moments = sorted(generator.sample(range(1, plan.settings["steps"]), one_of(NUMBER_OF_KILLS)))
    return plan._replace(kills=tuple(map(kill, moments)))


@functools.cache
def folder() -> Path:
    """Of all runs of this process. It stays where a run is not sound."""
    made = Path(tempfile.mkdtemp(prefix="hvd_ckpt_kills_"))
    atexit.register(lambda: shutil.rmtree(made) if not list(made.glob("*/seed-*")) else None)
    return made


def check(plan: FaultPlan) -> Iterator[str]:
    """Runs a fault plan, and compares with an undisturbed run: what is wrong. The folders of sound runs are removed."""
    place, size, controller = folder() / plan.layout, plan.size, plan.controller
    place.mkdir(exist_ok=True)
    write_text(place / "text.txt")
    # Replicas end in the same bits on any number of ranks; without them, bits depend on ranks and controller.
    replicated = "replicas" in LAYOUTS[plan.layout]
    sizes = [1 << power for power in range(size.bit_length())] if replicated else [size]
    reference = place / f"undisturbed-{sizes[0]}-{controller}"
    if not reference.exists():
        undisturbed = _Course(plan._replace(seed=0, size=sizes[0], kills=()), reference, sizes[:1])
        if faults := undisturbed.run():
            raise RuntimeError(f"the undisturbed run of {sizes[0]} ranks over {controller}: {faults}")
    course = _Course(plan, place / f"seed-{plan.seed}-{size}-{controller}", sizes)
    faults = course.run()
    if course.ended:
        ranks = None if replicated else size
        compared = differences(course.path, reference / "run", plan.settings["steps"], ranks)
        faults += [f"differs: {name}" for name in compared]
    yield from faults
    kills = f"{len(course.writing)} kills, {sum(course.writing)} of them while writing"
    yield Note(f"seed {plan.seed}, {plan.layout}: {kills}")
    if not faults:
        shutil.rmtree(course.path.parent)


class _Course:
    """The launches of one run in a new folder, on ``sizes`` ranks in turn. Without kills the job is not elastic.

    Attributes:
        path: the folder of the run.
        ended: whether it has come to its end.
        writing: for each kill that did not come too late, whether a snapshot was being written.
    """

    def __init__(self, plan: FaultPlan, folder: Path, sizes: Sequence[int]) -> None:
        folder.mkdir()
        self.path, self.ended, self.writing = folder / "run", False, list[bool]()
        self._plan, self._sizes = plan, sizes
        self._elastic = plan.layout == "elastic" and bool(plan.kills)
        self._kills = list(plan.kills)  # still to come
        self._newest = 0  # the step of the newest snapshot that was seen in place

    def run(self) -> list[str]:
        """Launches until the run has ended or failed; what is wrong, a line each."""
        faults = []
        for number in range(len(self._plan.kills) + 1):
            wrong, is_last = self._launch(number)
            faults += [f"launch {number + 1}: {text}" for text in wrong]
            if is_last:
                break
        return faults if faults or self.ended else ["it was not launched to its end"]

    def _launch(self, number: int) -> tuple[list[str], bool]:
        """One launch: what is wrong, and whether there is to be no other."""
        before = self._newest
        size = self._sizes[(self._plan.seed + number) % len(self._sizes)]
        arguments = ["--resume", str(self.path)]
        if not (self.path / "config.yaml").exists():
            text = self.path.parents[1] / "text.txt"
            arguments = flags({**self._plan.settings, "data": f"text:{text}", "output": self.path})
        view, log = RunView(self.path), self.path.parent / f"log-{number}.txt"
        with TrainJob(size, self._plan.controller, arguments, log, self._elastic) as job:
            was_killed = self._watch(job, view)
            status = job.status
            # Where the time is over the launcher still runs, and so may the others.
            left = 0 if status is None else job.left(LIMIT)
        wrong = unreadable(self.path, size) + [f"{left} processes left"] * bool(left)
        # Looked at from both sides: where the launch has resumed, and what the next one would resume from.
        first, newest = job.first_step(), newest_good(self.path)
        if (first is not None and first - 1 < before) or newest < self._newest:
            wrong.append("committed steps are lost")
        self.ended = status == 0 and newest == self._plan.settings["steps"]
        if status is None:
            wrong.append(f"no end after {SECONDS:.0f} s (log: {log})")
        elif not self.ended and not was_killed:
            wrong.append(f"status {status}: {job.failure()}")
        self._look()
        return wrong, self.ended or status is None or not was_killed

    def _watch(self, job: TrainJob, view: RunView) -> bool:
        """Waits until the launcher has ended or the time is over; whether a kill has happened."""
        start = time.monotonic()
        was_killed, may_be_killed = False, True
        while not job.ended and time.monotonic() - start < SECONDS:
            kill = self._kills[0] if self._kills and may_be_killed else None
            if kill is not None and _due(kill, view, time.monotonic() - start):
                time.sleep(kill.delay)
                # Before the signal: what is in place now must not be lost, and the job may be gone a moment later.
                self._look()
                writing = view.writing()
                if job.send(kill.who, kill.signal):
                    self.writing.append(writing)
                    self._kills.pop(0)
                    was_killed = True
                    # Only an elastic job that has lost one rank lives on, for the next kill to hit it.
                    may_be_killed = self._elastic and kill.who.startswith("rank") and kill.signal == "SIGKILL"
            self._look()
            time.sleep(POLL)
        return was_killed

    def _look(self) -> None:
        self._newest = max(self._newest, newest_step(self.path))


def _due(kill: Kill, view: RunView, seconds: float) -> bool:
    if kill.when == START:
        return seconds >= kill.at
    return view.last_step() >= kill.at and (kill.when == RUNNING or view.writing())
