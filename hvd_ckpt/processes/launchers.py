"""Launchers: the environment variables that they set, and the processes between a launcher and its ranks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import math
import os
import subprocess
from collections.abc import Iterable, MutableMapping
from pathlib import Path

import psutil

COUNTS = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
THREADS = "OMP_NUM_THREADS"
CYCLE = "HOROVOD_CYCLE_TIME"


def whole_in(variable: str) -> int | None:
    """The whole number from 0 in a variable; None if it holds none."""
    return _whole(os.environ.get(variable, ""))


def first_whole(variables: Iterable[str]) -> int | None:
    """The whole number in the first of some variables that holds one; None if none does."""
    return next((number for number in map(whole_in, variables) if number is not None), None)


def check_environment() -> None:
    """Refuses what would be taken for another number, or be waited for without an end.

    Raises:
        ValueError: a variable that a launcher sets holds no whole number, OMP_NUM_THREADS no number of threads, or
            HOROVOD_CYCLE_TIME no number of milliseconds; one line.
    """
    for variable in COUNTS:
        if variable in os.environ and whole_in(variable) is None:
            raise _wrong(variable, "a launcher sets it to a whole number, leave it alone")
    threads = os.environ.get(THREADS)
    if threads is not None and not all(_whole(part.strip()) for part in threads.split(",")):
        raise _wrong(THREADS, "give a whole number from 1, or unset it")
    cycle = os.environ.get(CYCLE)
    with contextlib.suppress(ValueError):
        if cycle is None or 0 < float(cycle) < math.inf:
            return
    raise _wrong(CYCLE, "give milliseconds above 0, or unset it")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _wrong(variable: str, way_out: str) -> ValueError:
    return ValueError(f"{variable} is {ascii(os.environ[variable])[:60]}: {way_out}")


GLOO_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
FOREIGN = {  # rank, size, and what nobody else sets
    "torchrun": ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")


def foreign_launcher() -> str | None:
    """``"torchrun"`` or ``"srun"`` if it has started this process as one of several ranks, which neither Horovod nor MPI knows of.

    Under ``srun --mpi=...`` MPI knows of the ranks, so Horovod starts over it, unless ``HOROVOD_CONTROLLER=gloo``. Ranks of a
    ``torchrun`` that ``srun`` or ``mpirun`` has started inherit variables of these, which are about torchrun itself.
    """
    if GLOO_ADDRESS in os.environ:
        return None
    for name, (_, size, *others) in FOREIGN.items():
        if (whole_in(size) or 0) > 1 and all(variable in os.environ for variable in others):
            over_gloo = os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
            by_process_manager = not over_gloo and ("PMI_RANK" in os.environ or "PMIX_RANK" in os.environ)
            known_to_mpi = "OMPI_COMM_WORLD_RANK" in os.environ or by_process_manager
            return None if name == "srun" and known_to_mpi else name
    return None


def adopt_launcher() -> str | None:
    """Gives this process the variables with Horovod's names for its rank if :func:`foreign_launcher` has started it."""
    launcher = foreign_launcher()
    if launcher is not None:
        for name, variable in zip(("HOROVOD_RANK", "HOROVOD_SIZE"), FOREIGN[launcher]):
            os.environ[name] = os.environ[variable]
        # Over MPI, which this launcher has not told of the other ranks, each of them would be a job of one rank.
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    return launcher


def launched_rank() -> int | None:
    """The rank that a launcher gave this process; None if no known launcher started it."""
    return first_whole(RANK_VARIABLES)


def launched_size() -> int:
    """The number of ranks that a launcher has started with this process; 1 if none has."""
    sizes = ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "PMIX_RANK" in os.environ:  # PMIx gives the size in messages alone, and Slurm in these
        sizes += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    return next(filter(None, map(whole_in, sizes)), 1)


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


def ranks_sharing_cpus(ranks: int) -> int:
    """How many of the ranks of this host, this one included, may run on CPUs that this one may run on.

    Fewer than all where the launcher has bound each to CPUs of its own, as ``srun`` does. It is read from the table of processes,
    when all ranks have started. Where that does not show them all, they count as sharing.

    Args:
        ranks: number of ranks on this host.
    """
    if ranks == 1 or not hasattr(os, "sched_getaffinity"):
        return ranks
    if len(os.sched_getaffinity(0)) == os.cpu_count():  # bound to none
        return ranks
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process()
        given = process.environ()  # at its start: this library adds names
        names = ("HOROVOD_RANK", "RANK", *RANK_VARIABLES, "SLURM_PROCID")
        variable = next((name for name in names if name in given), "")
        for above in process.parents() if variable else ():
            cpus = _cpus_of_ranks(above, variable)
            if len(cpus) >= ranks:
                shared = sum(not one.isdisjoint(os.sched_getaffinity(0)) for one in cpus.values())
                return max(shared, 1) if len(cpus) == ranks else ranks
    return ranks


def _cpus_of_ranks(above: psutil.Process, variable: str) -> dict[str, set[int]]:
    """The CPUs of each rank below a process, by the value of a variable that each was given."""
    cpus: dict[str, set[int]] = {}
    # Of a rank and the workers that it has started, the last counts.
    for process in above.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            rank = process.environ().get(variable)
            if rank is not None:
                cpus[rank] = os.sched_getaffinity(process.pid)
    return cpus


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


def is_elastic() -> bool:
    """True in a job of Horovod Elastic, where ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


SINGLE_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def set_single_copy(environment: MutableMapping[str, str]) -> None:
    """Lets the ranks that get this environment copy twice where they cannot read each other's memory, as in most containers.

    Open MPI 4 reads large messages from the memory of the rank that sends them. Otherwise it prints ``Read -1, expected 1198612,
    errno = 1`` for each message and copies twice.
    """
    if SINGLE_COPY not in environment and not _may_read_memory():
        environment[SINGLE_COPY] = "none"


@functools.cache
def _may_read_memory() -> bool:
    """Whether this process may read the memory of another process of its user."""
    # It reads from address 0 of a child: that is EFAULT where reading is allowed, else EPERM or ENOSYS. A child, since Open MPI
    # itself asks the kernel's Yama module to allow ranks what it allows parents only.
    buffer = ctypes.create_string_buffer(1)
    local, remote = _Range(ctypes.addressof(buffer), 1), _Range(None, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return True  # Open MPI has no such mechanism there either
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        libc.process_vm_readv(child.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        number = ctypes.get_errno()
    return number == errno.EFAULT
