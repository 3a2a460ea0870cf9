"""A rank of a job: ``python -m hvd_ckpt.app.compare.runner.rank WORKER JOB`` calls the job's function and tells what it returns.

An error is told, and ends the process at once: a clean exit would wait for ranks that are not coming.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

from hvd_ckpt.app.compare.runner.jobs import RankJob, reason
from hvd_ckpt.utils.named import import_named


def run_rank(worker: str, file: Path, variables: Mapping[str, str] | None = None) -> None:
    """Calls a function with the job in a file, of the type that the function takes.

    Args:
        variables: for a process that was forked, those that a launcher of ranks would set; a launcher also writes the log.
    """
    measure = import_named("function", worker)
    kind: type[RankJob] = get_type_hints(measure)["job"]
    job, status = kind.load(file), 0
    if variables is not None:
        os.environ.update(variables)
        with job.log_file.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    job.tell("born", pid=os.getpid())
    try:
        job.tell("done", value=measure(job))
    except Exception as error:
        job.tell("error", message=reason(error))
        traceback.print_exc()
        status = 1
    # At once, since the orderly end of what it has loaded takes long.
    if not status:
        atexit._run_exitfuncs()  # among them the ends of Horovod and of MPI
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]))
