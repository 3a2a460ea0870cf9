"""One rank of a check, run by the launcher as ``python -m hvd_ckpt.bench.gpu.worker JOB``."""

from __future__ import annotations

from importlib import import_module

from hvd_ckpt.bench.gpu.job import CheckJob, Outcome
from hvd_ckpt.bench.harness.jobs import run_rank


def measure(job: CheckJob) -> Outcome:
    """Calls the function of the check."""
    module, name = job.check.split(".")
    outcome: Outcome = getattr(import_module(f"hvd_ckpt.bench.gpu.{module}"), name)(job)
    return outcome


if __name__ == "__main__":
    run_rank(CheckJob, measure)
