"""Launchers of jobs here: ``horovodrun``, and the controllers that work, which are asked once as each question starts a job."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from hvd_ckpt.processes.probe import ProbeResult, probe as ask

SCRIPTS = Path(__file__).parent / "scripts"
NOT_FORKED = {"HVD_CKPT_TESTS_FORK_SERVER": ""}  # of ranks that are to be children of their launcher
HOROVODRUN = [sys.executable, str(SCRIPTS / "horovodrun.py")]


@functools.cache
def probe(controller: str) -> ProbeResult:
    """What a job of two ranks finds, as :func:`hvd_ckpt.processes.probe.probe`."""
    return ask(controller)


def start_ranks(
    ranks: int,
    script: Path,
    *arguments: str,
    controller: str = "gloo",
    launcher: Sequence[str] | None = HOROVODRUN,
    output: IO[str] | int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Starts a script on ranks of one thread, in a session of its own; all that they say goes to ``output``, by default a pipe.

    Without a launcher it is one process.
    """
    if "PYTHONPATH" in environment:
        paths = environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    words = [*launcher, "-np", str(ranks), f"--{controller}"] if launcher else []
    return subprocess.Popen(
        [*words, sys.executable, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_ranks(ranks: int, script: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    """Exit status and output of a job of :func:`start_ranks`."""
    with start_ranks(ranks, script, *arguments, **options) as job:
        try:
            output, _ = job.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            job.terminate()  # on which a launcher ends its ranks
            raise
    return job.returncode, output
