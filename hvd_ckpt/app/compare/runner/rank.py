"""A rank of a job: ``python -m hvd_ckpt.app.compare.runner.rank WORKER JOB`` calls the job's function and writes what it returns.

An error is written for the launcher, and ends the process at once: a clean exit would wait for ranks that are not coming.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from pathlib import Path
from typing import get_type_hints

from hvd_ckpt.app.compare.runner.jobs import RankJob, load_json, reason, save_json
from hvd_ckpt.processes.launchers import launched_rank
from hvd_ckpt.utils.named import import_named


def run_rank(worker: str, file: Path) -> None:
    """Calls a function with the job in a file, of the type that the function takes."""
    measure = import_named("function", worker)
    job: RankJob = load_json(get_type_hints(measure)["job"], file)
    rank = launched_rank() or 0
    try:
        save_json(measure(job), job.result_file(rank))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        # The launcher reports the error of the rank that wrote first: those that follow are consequences.
        job.error_file(rank).write_text(reason(error), encoding="utf-8")
        os._exit(1)
    if job.ends_at_once:
        atexit._run_exitfuncs()  # among them the ends of Horovod and of MPI
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]))
