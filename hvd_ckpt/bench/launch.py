"""Starts a job's ranks on this machine, waits for them and ends those that hang."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvd_ckpt.bench.job import Answer, Job
from hvd_ckpt.probe import launcher_environment

__all__ = ["JobError", "error_line", "rank_environment", "run_job", "run_ranks"]

WORKER = "hvd_ckpt.bench.worker"
GRACE_SECONDS = 10.0


class JobError(Exception):
    """A job ended without an answer of every rank; the message says why in one line."""


def rank_environment(threads: int) -> dict[str, str]:
    """The environment of every rank, whatever its engine: this process's, with the same number of CPU threads for all."""
    return {**launcher_environment(), "OMP_NUM_THREADS": str(threads)}


def run_job(job: Job, controller: str, environment: Mapping[str, str], timeout: float) -> list[Answer]:
    """Launch ``job`` over ``controller`` and return the answer of each rank, in rank order.

    Raises:
        JobError: a rank failed, or the job took longer than ``timeout`` seconds.
    """
    job.save()
    log_file = job.folder / "log.txt"
    status = run_ranks(WORKER, job.file, job.size, controller, environment, log_file, timeout)
    if status is None:
        raise JobError(f"no end after {timeout:.0f} s (log: {log_file})")
    if status != 0 or not all(job.answer_file(rank).exists() for rank in range(job.size)):
        raise JobError(f"{error_line(log_file)} (status {status}, log: {log_file})")
    return [Answer.load(job.answer_file(rank)) for rank in range(job.size)]


def run_ranks(
    module: str,
    file: Path,
    size: int,
    controller: str,
    environment: Mapping[str, str],
    log_file: Path,
    timeout: float,
) -> int | None:
    """Runs ``python -m module file`` on ``size`` ranks, all their output in ``log_file``.

    Returns:
        the launcher's exit status; None if the job took longer than ``timeout`` seconds and was ended
    """
    launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(size), f"--{controller}"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", module, str(file)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a launcher is gone; on SIGTERM it ends the ranks it has started."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def error_line(log_file: Path) -> str:
    """The line of a log that says what went wrong: the end of a rank's first traceback, or else the last line."""
    text = log_file.read_text(errors="replace")
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    told = [line for line in lines if line]
    return errors[0] if errors else told[-1] if told else "the launcher said nothing"
