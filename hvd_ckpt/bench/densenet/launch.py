"""Runs a job, and makes an answer of whatever becomes of it."""

from __future__ import annotations

from hvd_ckpt.bench.densenet.job import Answer, Job
from hvd_ckpt.bench.harness.jobs import run_ranks
from hvd_ckpt.probe import launcher_environment

__all__ = ["run_job"]

WORKER = "hvd_ckpt.bench.densenet.worker"


def run_job(job: Job, controller: str, timeout: float) -> list[Answer]:
    """Launch ``job`` over ``controller``; the answer of each rank, in rank order, or a single one that says what went wrong.

    Ranks have the environment of this process, and as many threads as :func:`hvd_ckpt.init` gives them.
    """
    job.save()
    log_file = job.folder / "log.txt"
    status = run_ranks(WORKER, job.file, job.size, controller, launcher_environment(), log_file, timeout)
    files = [job.answer_file(rank) for rank in range(job.size)]
    answers = [Answer.load(file) for file in files if file.exists()]
    failed = [answer for answer in answers if answer.failed]
    if failed or (status == 0 and len(answers) == job.size):
        return failed[:1] or answers
    what = f"no end after {timeout:.0f} s" if status is None else f"a rank ended, status {status}"
    return [Answer(0, note=f"failed: {what} (log: {log_file})", failed=True)]
