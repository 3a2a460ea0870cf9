"""The soak: a long run with a snapshot every 20 steps, whose processes must not grow.

Every few seconds each process of the job is looked at in /proc: its memory (resident, and what is its own alone), open
descriptors, threads. The first fifth of the time is left out. Through each process's memory goes a line (see
:mod:`hvd_ckpt.bench.faults.fit`, also for what counts as flat). Descriptors and threads rise and fall with every snapshot,
so of them the medians of the first and of the last quarter are compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hvd_ckpt.bench.faults.fit import Line, fit_line, without_start
from hvd_ckpt.bench.faults.job import TrainJob, logged_step, newest_step
from hvd_ckpt.bench.faults.processes import Process, marked

__all__ = ["EVERY", "Count", "Soaked", "Track", "soak"]

EVERY = 20  # steps between snapshots
SETTINGS = {
    "model": "gpt-tiny",
    "length": 64,
    "batch": 4,
    "accumulate": 2,
    "held-out": 0,
    "steps": 100_000_000,
    "schedule": "constant",
    "snapshot-every": EVERY,
    "keep-snapshots": 2,
}
INTERVAL = 5.0  # seconds between samples, less in a run of a few minutes
SAMPLES = 60  # at least
START_LIMIT, STOP_LIMIT = 180.0, 120.0  # seconds


@dataclass(frozen=True)
class Count:
    """Descriptors or threads over the time that is judged: medians of its first and last quarter, and the most."""

    first: float
    last: float
    most: int

    @property
    def flat(self) -> bool:
        """Whether there are no more at the end."""
        return self.last <= self.first


@dataclass
class Track:
    """A process over time; memory in MiB.

    Attributes:
        name: ``rank 0``, ``launcher``, or ``beside the launcher 1`` for what it has started to start ranks.
        seconds: of each sample, since the first of all.
        resident: memory that it has mapped and that is there.
        own: of it what no other process shares.
        descriptors, threads: numbers of them.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def line(self, values: list[float]) -> Line:
        """Through its :attr:`resident` or :attr:`own` memory, without the start."""
        return fit_line(*without_start(self.seconds, values))

    def count(self, values: list[int]) -> Count:
        """Of its :attr:`descriptors` or :attr:`threads`, without the start."""
        _, kept = without_start(self.seconds, values)
        quarter = max(len(kept) // 4, 1)
        first, last = statistics.median(kept[:quarter]), statistics.median(kept[-quarter:])
        return Count(first, last, round(max(kept)))

    @property
    def flat(self) -> bool:
        """Whether neither memory nor descriptors nor threads grow."""
        lines = all(self.line(values).flat for values in (self.resident, self.own))
        return lines and all(self.count(values).flat for values in (self.descriptors, self.threads))


@dataclass
class Soaked:
    """What a soak found.

    Attributes:
        tracks: of all processes that were there from the first sample to the last.
        steps: optimizer steps taken.
        snapshots: that were written.
        seconds: from the first sample to the last.
        failure: what went wrong, in one line.
    """

    tracks: list[Track] = field(default_factory=list)
    steps: int = 0
    snapshots: int = 0
    seconds: float = 0.0
    failure: str | None = None

    @property
    def sound(self) -> bool:
        """Whether it went to its end and all processes stayed as they were."""
        return self.failure is None and bool(self.tracks) and all(track.flat for track in self.tracks)


def soak(
    minutes: float, size: int, controller: str, text: Path, folder: Path, tick: Callable[[float], None]
) -> Soaked:
    """Trains for so many minutes and then touches the run's ``stop``.

    Args:
        size: number of ranks.
        text: to train on.
        folder: for the run and its log; made here.
        tick: gets the seconds that have passed.
    """
    folder.mkdir(parents=True)
    run = folder / "run"
    settings = {**SETTINGS, "text": text, "output": run}
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    soaked = Soaked()
    with TrainJob(size, controller, arguments, folder / "log.txt") as job:
        _wait(lambda: job.ended or newest_step(run) > 0, START_LIMIT)
        if newest_step(run) == 0:
            soaked.failure = (
                f"no snapshot after {START_LIMIT:.0f} s: {job.last_words()} (log: {job.log_file})"
            )
            return soaked
        soaked.tracks = _watch(job, minutes * 60, soaked, tick)
        soaked.steps = logged_step(run)
        if job.ended:
            soaked.failure = f"it ended by itself: {job.last_words()} (log: {job.log_file})"
            return soaked
        (run / "stop").touch()
        _wait(lambda: job.ended, STOP_LIMIT)
        status = job.process.poll()
        if status != 0:
            how = f"not within {STOP_LIMIT:.0f} s" if status is None else f"with status {status}"
            soaked.failure = f"it was asked to stop and did so {how} (log: {job.log_file})"
        elif "Warning: The snapshot" in job.log_file.read_text(encoding="utf-8", errors="replace"):
            soaked.failure = f"a snapshot was not written (log: {job.log_file})"
    soaked.snapshots = newest_step(run) // EVERY
    return soaked


def _wait(reached: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def _watch(job: TrainJob, seconds: float, soaked: Soaked, tick: Callable[[float], None]) -> list[Track]:
    interval = min(INTERVAL, seconds / SAMPLES)
    names = _names(marked(job.token), job.process.pid)
    tracks = {pid: Track(name) for pid, name in names.items()}
    start = time.monotonic()
    rounds = 0
    while not job.ended and (passed := time.monotonic() - start) <= seconds:
        for pid, track in tracks.items():
            with contextlib.suppress(OSError):
                _sample(pid, track, passed)
        rounds += 1
        soaked.seconds = round(passed, 1)
        tick(passed)
        time.sleep(max(start + rounds * interval - time.monotonic(), 0))
    return [track for track in tracks.values() if len(track.seconds) == rounds]


def _names(processes: list[Process], launcher: int) -> dict[int, str]:
    """A name for each process; shells that only wait for one of them are left out."""
    names = {launcher: "launcher"}
    beside: dict[str, int] = {}
    for process in processes:
        kind = "beside the launcher" if process.rank is None else f"rank {process.rank}"
        if process.pid != launcher and process.name not in ("sh", "bash", "dash"):
            beside[kind] = beside.get(kind, 0) + 1
            numbered = process.rank is None or beside[kind] > 1
            names[process.pid] = (
                f"{kind} {beside[kind]}"
                if process.rank is None
                else (f"{kind}, process {beside[kind]}" if numbered else kind)
            )
    return names


def _sample(pid: int, track: Track, moment: float) -> None:
    folder = Path("/proc") / str(pid)
    memory = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        memory[name] = int(rest.split()[0]) / 1024
    descriptors, threads = (len(os.listdir(folder / name)) for name in ("fd", "task"))
    track.seconds.append(round(moment, 2))
    track.resident.append(memory["Rss"])
    track.own.append(memory["Private_Clean"] + memory["Private_Dirty"])
    track.descriptors.append(descriptors)
    track.threads.append(threads)
