"""The soak: a long run with a snapshot every 20 steps, whose processes must not grow.

Every few seconds psutil reads each process's resident memory, the part that no other process shares, open descriptors and threads.
The first fifth of the time is left out. Memory is summed up by a line through its samples; descriptors and threads, which rise and
fall with every snapshot, by their medians in the first and in the last quarter.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from faults.job import TrainJob, flags, logged_step, marked, newest_step, rank_of, write_text
from notes import Note

RANKS = 2
EVERY = 20  # steps between snapshots
SETTINGS = {
    "model": "gpt-tiny",
    "sequence-length": 64,
    "batch": 4,
    "accumulate": 2,
    "validation-split": 0,
    "steps": 100_000_000,
    "schedule": "constant",
    "snapshot-every": EVERY,
    "keep-snapshots": 2,
}
MINUTES = 30.0
INTERVAL, SAMPLES = 5.0, 60  # seconds between samples, less if there would be fewer samples than these
START_LIMIT, STOP_LIMIT = 180.0, 120.0  # seconds
LEFT_OUT = 0.2  # of the time, at the start
FLAT = 0.01  # growth of memory over the whole time, as a part of the mean
MEASURES = ("resident MiB", "own MiB", "descriptors", "threads")


@dataclass(frozen=True)
class Growth:
    """How one measure of a process developed.

    Attributes:
        first, last: medians of the first and of the last quarter.
        per_hour: slope of the line through the samples (least squares).
        flat: whether descriptors or threads are no more at the end, or memory has risen by less than 1 % of its mean.
    """

    process: str
    measure: str
    mean: float
    first: float
    last: float
    per_hour: float
    flat: bool

    def __str__(self) -> str:
        change = f"{self.first:.1f} to {self.last:.1f}, {self.per_hour:+.2f} per hour"
        return f"{self.process}, {self.measure}: {change}{'' if self.flat else ', not flat'}"


@dataclass
class Soaked:
    """The result of a soak; ``growth`` is of the processes that ran from the first sample to the last."""

    growth: list[Growth] = field(default_factory=list)
    steps: int = 0
    snapshots: int = 0
    seconds: float = 0.0
    failure: str | None = None

    @property
    def sound(self) -> bool:
        """Whether the run stopped when it was asked to, and no process has grown."""
        return self.failure is None and bool(self.growth) and all(growth.flat for growth in self.growth)

    @property
    def remarks(self) -> list[str]:
        """The growth of each measure, and what went wrong."""
        size = f"{self.seconds / 60:.1f} minutes, {self.steps} steps, {self.snapshots} snapshots"
        return [size, *map(str, self.growth), *([self.failure] if self.failure else [])]


def growth(process: str, measure: str, times: list[float], values: list[float]) -> Growth:
    """The growth in at least 5 samples at times in seconds."""
    start = times[0] + LEFT_OUT * (times[-1] - times[0])
    times, values = zip(*((time, value) for time, value in zip(times, values) if time >= start))  # type: ignore[assignment]
    slope = statistics.linear_regression(times, values).slope
    quarter = max(len(values) // 4, 1)
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    mean = statistics.fmean(values)
    flat = slope * (times[-1] - times[0]) < FLAT * mean if measure.endswith("MiB") else last <= first
    return Growth(process, measure, mean, first, last, per_hour=3600 * slope, flat=flat)


def draw(seed: int, ranks: int, controller: str) -> str:
    """There is one soak over each controller."""
    return controller


def check(controller: str) -> Iterator[str]:
    """What grows, with the growth of all."""
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_soak_") as folder:
        soaked = soak(MINUTES, controller, Path(folder))
    yield from map(Note, soaked.remarks)
    if not soaked.sound:
        yield soaked.failure or "a process has grown"


def soak(minutes: float, controller: str, folder: Path) -> Soaked:
    """Trains for so many minutes and then touches the run's ``stop``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text.txt")
    run, log = folder / "run", folder / "log.txt"
    soaked = Soaked()
    arguments = flags({**SETTINGS, "data": f"text:{folder / 'text.txt'}", "output": run})
    with TrainJob(RANKS, controller, arguments, log) as job:
        _wait(lambda: job.ended or newest_step(run) > 0, START_LIMIT)
        if newest_step(run) == 0:
            soaked.failure = f"no snapshot after {START_LIMIT:.0f} s: {job.failure()}"
            return soaked
        soaked.growth, soaked.seconds = _watch(job, minutes * 60)
        soaked.steps = logged_step(run)
        if job.ended:
            soaked.failure = f"the run ended by itself: {job.failure()}"
            return soaked
        (run / "stop").touch()
        _wait(lambda: job.ended, STOP_LIMIT)
        if job.status != 0:
            soaked.failure = f"the run did not stop within {STOP_LIMIT:.0f} s with status 0 (log: {log})"
        elif "Warning: The snapshot" in log.read_text(encoding="utf-8", errors="replace"):
            soaked.failure = f"a snapshot was not written (log: {log})"
    soaked.snapshots = newest_step(run) // EVERY
    return soaked


def _wait(reached: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def _watch(job: TrainJob, seconds: float) -> tuple[list[Growth], float]:
    """The growth of the job's processes until the time is over or the job has ended, and the seconds that this took."""
    names = {}
    for number, process in enumerate(marked(job.token)):
        rank = rank_of(process)
        if process.name() not in ("sh", "bash", "dash"):  # shells only wait
            names[process] = f"launcher, process {number}" if rank is None else f"rank {rank}"
    times: list[float] = []
    samples: dict[psutil.Process, list[tuple[float, ...]]] = {process: [] for process in names}
    start = time.monotonic()
    while not job.ended and (passed := time.monotonic() - start) <= seconds:
        times.append(passed)
        for process, taken in samples.items():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                taken.append(
                    (memory.rss / 2**20, memory.uss / 2**20, process.num_fds(), process.num_threads())
                )
        # Until the next multiple of the interval, so that the time of reading does not add up.
        time.sleep(max(len(times) * min(INTERVAL, seconds / SAMPLES) - (time.monotonic() - start), 0))
    grown = [
        growth(name, measure, times, list(values))
        for process, name in names.items()
        if len(samples[process]) == len(times) >= 5
        for measure, values in zip(MEASURES, zip(*samples[process]))
    ]
    return grown, round(times[-1], 1)
