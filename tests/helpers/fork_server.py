"""The start of the process whose forks ranks and commands of tests are; ``forking/sitecustomize.py`` tells why."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

FORKING = Path(__file__).parent / "forking"
ADDRESS = "HVD_CKPT_TESTS_FORK_SERVER"


@contextlib.contextmanager
def fork_server(
    environment: Mapping[str, str] = os.environ, *, ours: bool = True
) -> Iterator[dict[str, str]]:
    """Starts it with that environment; yields the variables of processes that are to be its forks. Unless ``ours``, these import
    this library themselves."""
    path = tempfile.mktemp(prefix="hvd_ckpt_tests_")  # short, as addresses of sockets are
    folders = [str(FORKING), *filter(None, [environment.get("PYTHONPATH")])]
    variables = {ADDRESS: path, "PYTHONPATH": os.pathsep.join(folders)}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, str(FORKING / "server.py"), str(listener.fileno()), *(["ours"] if ours else [])],
            env={**environment, "PYTHONPATH": variables["PYTHONPATH"], "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    try:
        with server:  # which ends when its standard input does; without it processes start as usual
            yield variables
    finally:
        os.unlink(path)


def is_running() -> bool:
    """Whether this process was started with the variables of one."""
    started = sys.modules.get("sitecustomize")
    return bool(os.environ.get(ADDRESS)) and getattr(started, "__file__", None) == str(
        FORKING / "sitecustomize.py"
    )
