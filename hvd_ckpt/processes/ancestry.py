"""The processes around a rank, in the table of processes: those up to its launcher, with which it ends, and the other ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path

import psutil

from hvd_ckpt.processes.launchers import RANK_VARIABLES, launched_rank

SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
LOOK_SECONDS = 1.0


def end_with_parent() -> bool:
    """Ends this process, within seconds, when the launcher that started it goes; meant for commands that run as ranks.

    ``horovodrun --gloo`` and ``mpirun`` take their ranks with them even when they are killed with SIGKILL. ``horovodrun --mpi``
    does not: it turns itself into a shell that waits for ``mpirun``, and killing that leaves ``mpirun`` and its ranks running;
    nor does an ssh connection that ends. This looks once a second whether one of the processes from this one up to the launcher
    (or, where ssh brought it here, ssh's daemon) has lost its parent.

    Returns:
        True if there is a launcher above this process; False if it was started some other way, and nothing is done.
    """
    from hvd_ckpt.processes import watchdog  # which imports Horovod

    chain = launcher_chain(os.getpid()) if launched_rank() is not None else []

    def look() -> None:
        while not has_broken(chain):
            time.sleep(LOOK_SECONDS)
        watchdog.end(f"{watchdog.who()}: the launcher that started it has gone, so it ends too")

    if chain:
        threading.Thread(target=look, name="hvd_ckpt launcher", daemon=True).start()
    return bool(chain)


def launcher_chain(rank: int) -> list[psutil.Process]:
    """The processes from a rank up to its launcher; empty if there is no launcher above it.

    The launcher is the first ancestor that is not part of the rank, whatever its name: ``mpirun``, ``orted``, ``slurmstepd``,
    ``horovodrun`` or a program that calls Horovod's. Over ssh, where the launcher is elsewhere, it is ssh's daemon. A shell that is
    not part of the rank does not count: somebody may have given the rank by hand, and leave the shell while it trains.
    """
    # From the rank upward; what is in parentheses is part of the rank:
    #
    #     horovodrun --gloo    rank  (shell with HOROVOD_RANK=...)  (helper of Horovod's)  horovodrun
    #     horovodrun --mpi     rank  mpirun  the shell that horovodrun has become
    #     mpirun               rank  mpirun, or orted on another host
    chain = [psutil.Process(rank)]
    parents = [process for process in chain[0].parents() if process.pid > 1]
    for parent, above in itertools.zip_longest(parents, parents[1:]):
        chain.append(parent)
        if _is_part_of_rank(parent):
            continue
        if _is_shell(_command(parent)):
            break
        return [*chain, above] if above is not None and _is_shell_of_mpirun(_command(above)) else chain
    return []


def has_broken(chain: list[psutil.Process]) -> bool:
    """Whether one of the processes has lost its parent, the next in the list."""
    # An orphan has another parent from then on: init, or a process that collects orphans.
    try:
        return any(child.ppid() != parent.pid for child, parent in itertools.pairwise(chain))
    except psutil.NoSuchProcess:
        return True


def _is_part_of_rank(process: psutil.Process) -> bool:
    """Whether a process was given the rank, gives it, as Horovod's shells do, or is Horovod's helper that starts such a shell."""
    with contextlib.suppress(psutil.Error):  # of another user's, as ssh's daemon may be, nothing can be read
        if any(name in process.environ() for name in RANK_VARIABLES):
            return True
    command = _command(process)
    if _is_shell(command):
        return any(f"{name}=" in word for word in command for name in RANK_VARIABLES)
    return "--multiprocessing-fork" in command


def _is_shell(command: list[str]) -> bool:
    return Path(command[0]).name.removeprefix("-") in SHELLS


def _is_shell_of_mpirun(command: list[str]) -> bool:
    """True for the shell that ``horovodrun --mpi`` turns into."""
    return (
        command[1:2] == ["-c"] and command[2].startswith("mpirun ") and not command[2].rstrip().endswith("&")
    )


def _command(process: psutil.Process) -> list[str]:
    """The words of a process's command line; one empty word where they cannot be read."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline() or [""]
    return [""]


def ranks_sharing_cpus(ranks: int) -> int:
    """How many of the ranks of this host, this one included, may run on CPUs that this one may run on.

    Fewer than all where the launcher has bound each to CPUs of its own, as ``srun`` does. It is read from the table of processes,
    when all ranks have started. Where that does not show them all, they count as sharing.

    Args:
        ranks: number of ranks on this host.
    """
    with contextlib.suppress(psutil.Error, OSError):
        process, own = psutil.Process(), os.sched_getaffinity(0)
        given = process.environ()  # at its start: this library adds names
        names = ("HOROVOD_RANK", "RANK", *RANK_VARIABLES, "SLURM_PROCID")
        variable = next((name for name in names if name in given), "")
        for above in process.parents() if variable else ():
            cpus: dict[str, set[int]] = {}
            # Of a rank and the workers that it has started, the last counts.
            for below in above.children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    rank = below.environ().get(variable)
                    if rank is not None:
                        cpus[rank] = os.sched_getaffinity(below.pid)
            if len(cpus) >= ranks:
                sharing = sum(not own.isdisjoint(each) for each in cpus.values())
                return max(sharing, 1) if len(cpus) == ranks else ranks
    return ranks
