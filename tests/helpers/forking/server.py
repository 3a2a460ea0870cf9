"""The process whose forks are the ranks and commands of tests; ``sitecustomize.py`` tells why and is its client."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from typing import Any, NoReturn

import numpy

PRELOADED = [
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "horovod.torch",
    "transformers.models.bert.modeling_bert",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.xlnet.modeling_xlnet",
    "transformers.models.gpt2.modeling_gpt2",
    "hvd_ckpt.app.cli.main",
    "hvd_ckpt.app.training.trainer",
    *(["lightning.pytorch"] if importlib.util.find_spec("lightning") else []),
]
LIBC = ctypes.CDLL(None, use_errno=True)
OUR_FILES = (__file__, runpy.__file__, "<frozen runpy>")  # whose frames no traceback of a rank shows


def serve(listener: socket.socket) -> None:
    """Takes requests until the process that started this one closes its end of standard input."""
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ, None)
    waiting.register(0, selectors.EVENT_READ, "end")
    while True:
        for key, _ in waiting.select():
            if key.data == "end":
                for other in list(waiting.get_map().values()):
                    if isinstance(other.data, tuple):
                        kill(other.data[0])
                return
            if key.data is None:
                connection, _ = listener.accept()
                rank = fork(connection)
                if rank is not None:
                    ended = os.pidfd_open(rank)
                    waiting.register(ended, selectors.EVENT_READ, (rank, ended, connection))
                    waiting.register(connection, selectors.EVENT_READ, (rank, ended, connection))
                continue
            rank, ended, connection = key.data
            if key.fileobj is connection:  # nobody waits for the rank any more
                kill(rank)
                waiting.unregister(connection)
                continue
            _, status = os.waitpid(rank, 0)
            waiting.unregister(ended)
            os.close(ended)
            if connection in waiting.get_map():
                waiting.unregister(connection)
                with connection, contextlib.suppress(OSError):  # a client that has gone meanwhile
                    connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
            connection.close()


def kill(rank: int) -> None:
    """Ends a rank and what it has started in its process group."""
    os.kill(rank, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # that has not left this process's yet
        os.killpg(rank, signal.SIGKILL)


def fork(connection: socket.socket) -> int | None:
    """The process id of a rank, or of its parent; None if the client is to run it itself."""
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    size = struct.unpack("i", head)[0] if len(head) == 4 else 0
    text = b""
    while len(text) < size and (piece := connection.recv(size - len(text))):
        text += piece
    rank = 0
    if size and len(text) == size:
        request = json.loads(text)
        peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        elsewhere = _namespaces(peer)
        if request["prefix"] == sys.prefix and not (elsewhere and os.geteuid()):
            rank = os.fork()
            if rank == 0:
                os.setsid()
                _end_with_parent()
                if elsewhere:
                    _enter(elsewhere)
                with contextlib.suppress(OSError):  # the server sees it, too
                    connection.sendall(struct.pack("i", os.getpid()))
                connection.close()
                _run(request, files)
    if not rank:
        with contextlib.suppress(OSError):  # a client that has gone already
            connection.sendall(struct.pack("i", 0))
        connection.close()
    for file in files:
        os.close(file)
    return rank or None


def _namespaces(peer: int) -> list[str]:
    """The namespaces of a process on another host of ``hosts.py``, the processes' first and the files' last; none on this one."""
    there = [f"/proc/{peer}/ns/{kind}" for kind in ("pid", "net", "uts", "ipc", "mnt")]
    with contextlib.suppress(FileNotFoundError):
        return [path for path in there if os.readlink(path) != os.readlink(path.replace(str(peer), "self"))]
    return []


def _enter(namespaces: list[str]) -> None:
    """Goes on in those namespaces, as a child of a process that ends with it and as it ends."""
    files = [os.open(path, os.O_RDONLY) for path in namespaces]
    for file in files:
        if LIBC.setns(file, 0):
            print(f"setns: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
            os._exit(1)
        os.close(file)
    child = os.fork()
    if child == 0:
        _end_with_parent()
        return
    os.closerange(0, 1024)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _end_with_parent() -> None:
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Runs a Python script, or ``-m`` and a module, as an interpreter of its own would, to its end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1024)
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _set_threads()
    numpy.random.seed()  # as fresh processes; random does so by itself
    words = request["words"]
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[:0] = [os.getcwd(), *path]
            sys.modules.pop(words[1], None)  # it may be one of those that were imported
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[:0] = [os.path.dirname(os.path.abspath(words[0])), *path]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in OUR_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _set_threads() -> None:
    """PyTorch has read these variables for this process already."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(
        int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0))
    )


if __name__ == "__main__":
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    for module in PRELOADED:
        if "ours" in sys.argv or not module.startswith("hvd_ckpt"):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # forks neither look at what was imported nor copy it
    serve(socket.socket(fileno=int(sys.argv[1])))
