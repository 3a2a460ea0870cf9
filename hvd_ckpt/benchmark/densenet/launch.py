"""Starts a job's ranks on this machine, waits for them and ends those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from hvd_ckpt.benchmark.densenet.job import Answer, Job
from hvd_ckpt.probe import launcher_environment

__all__ = ["run_job"]

WORKER = "hvd_ckpt.benchmark.densenet.worker"
GRACE_SECONDS = 10.0


def run_job(job: Job, controller: str, timeout: float) -> list[Answer]:
    """Launch ``job`` over ``controller``; the answer of each rank, in rank order, or a single one that says what went wrong.

    Ranks have the environment of this process, and as many threads as :func:`hvd_ckpt.init` gives them.
    """
    job.save()
    log_file = job.folder / "log.txt"
    launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(job.size), f"--{controller}"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*launcher, sys.executable, "-m", WORKER, str(job.file)],
            env=launcher_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    files = [job.answer_file(rank) for rank in range(job.size)]
    answers = [Answer.load(file) for file in files if file.exists()]
    failed = [answer for answer in answers if answer.failed]
    if failed or (status == 0 and len(answers) == job.size):
        return failed[:1] or answers
    what = f"no end after {timeout:.0f} s" if status is None else f"a rank ended, status {status}"
    return [Answer(0, note=f"failed: {what} (log: {log_file})", failed=True)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a launcher is gone; on SIGTERM it ends the ranks it has started."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
