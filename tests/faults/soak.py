"""The soak: a long run with a snapshot every 20 steps, whose processes must not grow.

Every few seconds psutil reads each process's resident memory, the part that no other process shares, open descriptors and threads.
The first fifth of the time is left out, and each is summed up by its medians in the first and in the last quarter of the rest:
descriptors and threads rise and fall with every snapshot.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
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
FLAT = 0.01  # growth of memory, as a part of it
MEASURES = ("resident MiB", "own MiB", "descriptors", "threads")


def draw(seed: int, ranks: int, controller: str) -> str:
    """There is one soak over each controller."""
    return controller


def check(controller: str) -> Iterator[str]:
    """Trains, and then touches the run's ``stop``: what grows, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_soak_") as made:
        run, log, text = (Path(made) / name for name in ("run", "log.txt", "text.txt"))
        write_text(text)
        arguments = flags({**SETTINGS, "data": f"text:{text}", "output": run})
        with TrainJob(RANKS, controller, arguments, log) as job:
            _wait(lambda: job.ended or newest_step(run) > 0, START_LIMIT)
            if newest_step(run) == 0:
                yield f"no snapshot after {START_LIMIT:.0f} s: {job.failure()}"
                return
            yield from _grown(job, MINUTES * 60)
            yield Note(f"{logged_step(run)} steps, {newest_step(run) // EVERY} snapshots")
            if job.ended:
                yield f"the run ended by itself: {job.failure()}"
                return
            (run / "stop").touch()
            _wait(lambda: job.ended, STOP_LIMIT)
            if job.status != 0:
                yield f"the run did not stop within {STOP_LIMIT:.0f} s with status 0: {job.failure()}"
            elif "Warning: The snapshot" in log.read_text(encoding="utf-8", errors="replace"):
                yield "a snapshot was not written"


def _wait(reached: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def _grown(job: TrainJob, seconds: float) -> Iterator[str]:
    """How the job's processes develop until the time is over or the job has ended: a note for each measure that is flat."""
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
                counts = process.num_fds(), process.num_threads()
                taken.append((memory.rss / 2**20, memory.uss / 2**20, *counts))
        # Until the next multiple of the interval, so that the time of reading does not add up.
        time.sleep(max(len(times) * min(INTERVAL, seconds / SAMPLES) - (time.monotonic() - start), 0))
    yield Note(f"{times[-1] / 60:.1f} minutes")
    stayed = [process for process, taken in samples.items() if len(taken) == len(times) >= 5]
    if not stayed:
        yield "no process ran from the first sample to the last"
    for process in stayed:
        for measure, values in zip(MEASURES, zip(*samples[process])):
            later = values[int(LEFT_OUT * len(values)) :]
            quarter = max(len(later) // 4, 1)
            first, last = statistics.median(later[:quarter]), statistics.median(later[-quarter:])
            text = f"{names[process]}, {measure}: {first:.1f} to {last:.1f}"
            allowed = first * (1 + FLAT) if measure.endswith("MiB") else first
            yield Note(text) if last <= allowed else f"{text}, not flat"
