"""``horovodrun`` that starts ranks quickly: over Gloo all are forked from one process that has imported what takes long.

Importing PyTorch and what its optimizers need takes a fresh rank seconds of a core. Horovod starts a process for each rank, which
runs the rank's command in a shell. Here :mod:`multiprocessing`'s fork server starts it, and it forks again where the command is a
Python script or ``python -m module``, whose imports are made before. So the processes between launcher and rank are others than
usual: tests of those need ``horovodrun.py``.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import horovodrun  # noqa: F401  # which knows what Horovod was built with
from horovod.runner import launch
from horovod.runner.common.util import safe_shell_exec

PRELOADED = ["__main__", "torch", "torch._dynamo", "torch.distributed", "horovod.torch", "hvd_ckpt.runtime"]
OUR_FILES = (__file__, runpy.__file__, "<frozen runpy>")  # whose frames no traceback of a rank shows
run_in_shell = safe_shell_exec.subprocess.Popen


def start_rank(command: str, shell: bool, env: dict[str, str] | None, stdout: Any, stderr: Any) -> Any:
    """Takes the place of ``subprocess.Popen``: a Python script or module in a fork of this process."""
    words = shlex.split(command)
    settings = dict(os.environ if env is None else env)
    while words and (words[0] == "env" or "=" in words[0]):
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    if words[:1] == [os.path.join(os.path.dirname(sys.executable), "hvd-ckpt")]:
        words.insert(0, sys.executable)
    if words[:1] != [sys.executable] or (words[1].startswith("-") and words[1] != "-m"):
        return run_in_shell(command, shell=shell, env=env, stdout=stdout, stderr=stderr)
    guard = os.fork()
    if guard == 0:  # in the place of the shell, whose child the rank is
        rank = os.fork()
        if rank == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.environ.clear()
            os.environ.update(settings)
            _run(words[1:])
        _, status = os.waitpid(rank, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    return SimpleNamespace(pid=guard, wait=lambda: os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))


def _run(words: list[str]) -> NoReturn:
    """Runs a Python script, or ``-m`` and a module, as an interpreter of its own would, to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[0] = os.getcwd()
            sys.modules.pop(words[1], None)  # as the preloaded one; it runs anew
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
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
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


launch.gloo_built = launch.mpi_built = lambda verbose=False: (
    True
)  # to find out, it would import PyTorch itself
safe_shell_exec.subprocess = SimpleNamespace(Popen=start_rank)
safe_shell_exec.multiprocessing = SimpleNamespace(
    get_context=lambda kind: multiprocessing.get_context("forkserver")
)

if __name__ == "__main__":
    modules = [following for word, following in itertools.pairwise(sys.argv) if word == "-m"]
    multiprocessing.set_forkserver_preload(PRELOADED + modules)
    launch.run_commandline()
