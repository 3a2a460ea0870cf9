"""Ranks and commands that start quickly: forks of a process that has imported what takes long, ``server.py`` beside this file.

Importing PyTorch and what its optimizers need takes a fresh process four seconds of a core. Python imports this module when it
starts, where ``PYTHONPATH`` has its folder. In a rank, a launcher or a command of this library it hands arguments, environment
and open files to the server and stays in the place of the fork: it passes signals on to it, ends as it ends, and the fork ends
with this process. Any other process, and one of another environment, starts as usual, and so does each where the variable is
empty or missing.

All forks have the server's hash seed: the tests of two ranks over Gloo, which start as usual, find what depends on the order of
sets.
"""

from __future__ import annotations

import os
import sys

SERVER = "HVD_CKPT_TESTS_FORK_SERVER"  # the path of its socket, set by fork_server.py
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS")
PROGRAMS = ("/hvd-ckpt", "/scripts/horovodrun.py", "/tests/run.py", "/tests/seeds.py")
PACKAGES = ("hvd_ckpt", "benchmarks", "pytest", "torch")


def can_be_forked(words: list[str]) -> bool:
    if len(words) > 2 and words[1] == "-m":
        ours = words[2].partition(".")[0] in PACKAGES
    elif len(words) > 1 and not words[1].startswith("-"):
        ours = words[1].endswith(PROGRAMS)
    else:
        return False
    return ours or any(name in os.environ for name in RANKS)


def run_in_fork(address: str, words: list[str]) -> None:
    import contextlib
    import json
    import signal
    import socket
    import struct

    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return  # there is no server any more
    facts = {"words": words[1:], "environment": dict(os.environ), "folder": os.getcwd(), "prefix": sys.prefix}
    request = json.dumps({**facts, "cores": list(os.sched_getaffinity(0))}).encode()
    socket.send_fds(connection, [struct.pack("i", len(request))], [0, 1, 2])
    connection.sendall(request)
    answer = connection.recv(4, socket.MSG_WAITALL)
    pid = struct.unpack("i", answer)[0] if len(answer) == 4 else 0
    if pid == 0:
        return  # the server does not take it

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for name in ("HUP", "INT", "TERM", "USR1", "USR2", "CONT"):
        signal.signal(signal.Signals[f"SIG{name}"], pass_on)
    answer = connection.recv(4, socket.MSG_WAITALL)
    status = struct.unpack("i", answer)[0] if len(answer) == 4 else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if os.environ.get(SERVER) and can_be_forked(sys.orig_argv):
    run_in_fork(os.environ[SERVER], sys.orig_argv)
