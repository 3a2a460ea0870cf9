"""Where ranks come from: processes that a launcher has started, which have imported everything, and fork on demand.

Importing PyTorch, Horovod and Transformers takes seconds, a fork takes milliseconds; so a cell that fails costs no
more than its fresh start has to. Run as ``python -m hvd_ckpt.bench.compare.nursery FOLDER`` under ``horovodrun``: one process for
each rank. The launcher writes ``start1.json``, ``start2.json``, ... into the folder, each naming a job's file; every
process forks a rank for it, waits for its end, and writes how it ended. A file named ``close`` ends them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from hvd_ckpt.bench.compare.engines import launched_rank_and_size
from hvd_ckpt.bench.compare.events import EventWriter
from hvd_ckpt.bench.compare.worker import work

__all__ = ["CLOSE", "start_file"]

POLL_SECONDS = 0.02
CLOSE = "close"


def start_file(folder: Path, number: int) -> Path:
    """The file that asks for the start of that number, from 1."""
    return folder / f"start{number}.json"


def main(folder: Path) -> None:
    """Fork a rank for each start that is asked for, one after the other."""
    rank, _ = launched_rank_and_size()
    _import_workloads()
    gc.collect()
    gc.freeze()  # imports have left a million objects that no collection in a rank needs to visit
    with EventWriter(folder, rank) as events:
        events.write("up", pid=os.getpid())
    number = 1
    while True:
        asked = start_file(folder, number)
        if asked.exists():
            job_file = Path(json.loads(asked.read_text())["job"])
            status = _run_in_fork(job_file)
            with EventWriter(job_file.parent, rank) as events:
                events.write("ended", status=status)
            number += 1
        elif (folder / CLOSE).exists() or os.getppid() == 1:
            return
        else:
            time.sleep(POLL_SECONDS)


def _import_workloads() -> None:
    """What ranks need, where it is installed; a rank that misses something says so itself."""
    for name in (
        "hvd_ckpt.models.bert",
        "hvd_ckpt.models.densenet",
        "sklearn.datasets",
        "hvd_ckpt",
        "horovod.torch",
    ):
        try:
            __import__(name)
        except ImportError:
            continue


def _run_in_fork(job_file: Path) -> int:
    """Run one rank in a child process; returns its exit status, negative for a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            status = work(job_file)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if status:
                os._exit(status)  # a clean exit would wait for ranks that are not coming
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
