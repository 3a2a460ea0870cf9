"""The processes of a job: the start of Horovod with the settings of this library, and facts about the job.

Gradients are repeatable bit for bit only if Horovod does not fuse tensors. Its fusion packs tensors by
arrival time, so a ring sums them in another order in every run. :func:`init` therefore turns fusion off
(buckets replace it) unless the user has set it. It also gives every rank its share of the CPUs, because N
ranks with a full set of threads each are slower than one. The other functions return facts about the
job and start nothing.

Importing this module loads ``horovod.torch`` but neither initializes MPI nor imports mpi4py.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import horovod.torch as hvd
import torch

from hvd_ckpt.processes import grid, watchdog
from hvd_ckpt.processes.grid import require_initialized
from hvd_ckpt.processes.launchers import (
    CYCLE,
    THREADS,
    adopt_launcher,
    check_environment,
    first_whole,
    is_elastic,
    launched_rank,
)
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.rules import check

FUSION_VARIABLE = "HOROVOD_FUSION_THRESHOLD"
AUTOTUNE_VARIABLE = "HOROVOD_AUTOTUNE"
MPI_PREFIX_VARIABLE = "OPAL_PREFIX"
LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

CYCLE_MILLISECONDS = 5  # per rank on a CPU; see init()
RESTARTS_SYMBOL = "horovod_restarts_with_fixed_parameters"  # see hvd_ckpt/app/install/horovod.patch


@dataclass
class _State:
    """Decisions and observations of this process; one instance per process."""

    started: bool = False
    warned: bool = False


_state = _State()


def init(
    *args: Any, stall_timeout: float | None = None, stages: int = 1, tensor: int = 1, **kwargs: Any
) -> None:
    """Start Horovod: ``horovod.torch.init`` after this library's environment defaults.

    It takes Horovod's own arguments: ``comm`` (a list of ranks of ``MPI_COMM_WORLD`` or an mpi4py communicator)
    and ``process_sets``. It sets these defaults, and keeps every value that the user has set:

    * ``HOROVOD_FUSION_THRESHOLD=0``, unless it is set or ``HOROVOD_AUTOTUNE`` lets Horovod tune it. With
      fusion on, results are right but not repeatable bit for bit, and rank 0 warns once.
    * ``NCCL_NVLS_ENABLE=0``: sums that NVLink's switches compute (NVLink SHARP, from the H100 on) differ from call to call.
    * ``torch.set_num_threads(CPUs this process may use // ranks of this host that share them)``, at least 1, unless
      ``OMP_NUM_THREADS`` is set.
    * ``HOROVOD_CYCLE_TIME=5`` (times the ranks per CPU, if there are more) instead of 1, if the launcher starts several ranks on a
      machine, more than one for two of the CPUs that they share. Horovod's background thread then has no CPU to itself. The cycle
      time is the number of milliseconds between two rounds in which ranks negotiate collectives, and keep each other from
      computing. Over MPI, a collective of your own takes up to that many milliseconds longer. The cycle time is not changed with
      Horovod's autotuning. It is also not changed over Gloo unless `hvd-ckpt build-horovod` built Horovod. That build begins a
      round over Gloo when a tensor is added, and makes rounds without one ten times rarer. Another build does neither, and cannot
      start twice with both variables set.
    * ``OMPI_MCA_mpi_yield_when_idle=1`` under the same condition, so that Open MPI yields its CPU while it waits.
    * ``OMPI_MCA_btl_vader_single_copy_mechanism=none``, if ranks over Open MPI cannot read each other's memory, as in most
      containers. Otherwise Open MPI prints a message for every large transfer.
    * ``OPAL_PREFIX``, if Open MPI is in this Python environment. Without it, a process that no launcher
      started looks for Open MPI's helpers in the folder where the library was compiled.

    The launcher may also be ``torchrun`` or ``srun``, which do not support Horovod. Their ranks connect over Gloo, at the
    address of the first rank (``MASTER_ADDR`` and ``MASTER_PORT``, which ``torchrun`` sets and under ``srun`` may be set).

    Horovod's synchronous calls then sleep, as its own do not, so a rank that waits leaves its CPU to others. With the Horovod of
    `hvd-ckpt build-horovod` they sleep until the result is there, with another build between two looks for it.

    An error that the script does not catch is shown once per host. Later ranks that end with the same error, and ranks that lose
    another rank, write one line. A ``sys.excepthook`` that is not Python's own is not replaced.

    Calling the function again while Horovod runs changes only ``stall_timeout``, if it is given. After ``shutdown()`` it
    starts Horovod again over Gloo; MPI can start only once in a process.

    Args:
        stall_timeout: limit in seconds of each wait for other ranks: Horovod's start and end, a collective, ``barrier``, ``join``,
            a loop that polls. A process that waits longer ends with status 1, within about three more seconds. A line on stderr
            names the hosts that do not answer, or ranks on its own host that have ended or are stopped. With None there is only
            Horovod's own limit, and a wait of more than a minute prints one line that names the operation. ``math.inf`` removes an
            earlier limit. Give it on every rank (it is then collective). It must be longer than ranks are ever apart, such as at
            the start, or while one rank validates and the others wait. It also applies after Horovod is shut down and started
            again. The start of an elastic job, which waits for hosts, may also last for ``HOROVOD_ELASTIC_TIMEOUT`` (600) and
            ``HOROVOD_GLOO_TIMEOUT_SECONDS``.
        stages: number of pipeline stages, for :class:`hvd_ckpt.Pipeline`. It must divide the number of processes. Each stage has
            the same number of replicas, and the process number is ``stage * replicas + replica``. The replicas of a stage form a
            Horovod world, so ``rank()`` is the replica, ``size()`` is the number of replicas, and every collective runs among
            them. :func:`grid` has the stage and the number of stages.
        tensor: number of parts of each split layer, for :func:`hvd_ckpt.tensor_parallel`. The process number is
            ``(stage * replicas + replica) * tensor + part``. Horovod's world is then the replicas of one stage and part.
            :func:`grid` has the part and the number of parts.

    Horovod 0.28.1 has limits of its own (measured). Over Gloo, a peer that is stopped or cut off raises ``HorovodInternalError``
    after ``HOROVOD_GLOO_TIMEOUT_SECONDS`` (30). An elastic job recovers from this error, so choose a longer ``stall_timeout``
    there. A rank that is alive but never calls a collective raises nothing. Over MPI neither case has a limit. Horovod's stall
    check names the ranks that have not called a collective after ``HOROVOD_STALL_CHECK_TIME_SECONDS`` (60). It raises
    ``HorovodInternalError`` after ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` (0: never), but only over MPI, and only while all ranks
    still answer each other.

    Raises:
        ValueError: Horovod cannot start, or its arguments are wrong (Horovod's own message). Or ``stall_timeout`` is not a number
            above zero, or an environment variable that must be a number is not. Or the ranks of ``torchrun`` or ``srun`` do not
            connect. Or ``stages`` times ``tensor`` does not divide the number of processes, differs from the value that Horovod
            was started with, or is given with ``comm``.
        RuntimeError: Horovod ran over MPI before, and ``shutdown()`` has ended MPI. Or Horovod would have to start again, now or
            later in an elastic job, with both variables set, and cannot.
    """
    # First of all: everything below reads the rank under Horovod's names of the variables.
    launcher = adopt_launcher()
    _show_uncaught_errors()
    if stall_timeout is not None:
        watchdog.check_timeout(stall_timeout)
    given = {"stages": stages if stages != 1 else None, "tensor": tensor if tensor != 1 else None}
    check({**given, "comm": bool(args) or kwargs.get("comm") is not None})
    if hvd.is_initialized():
        for name, asked in (("stages", stages), ("tensor", tensor)):
            running = getattr(grid.current(), name)
            if asked not in (1, running):
                raise ValueError(
                    f"init(): Horovod runs with {name}={running} already, so it cannot have {asked}"
                )
        watchdog.watch(stall_timeout)
        if args or kwargs:
            hvd.init(*args, **kwargs)  # which checks them, and keeps its ranks
        return
    if _starts_over_mpi():
        from hvd_ckpt.processes import mpi

        mpi.prepare()
    check_environment()
    if launcher is not None:
        from hvd_ckpt.processes import rendezvous

        rendezvous.join_job(launcher, stall_timeout)
    # Before Horovod starts: it, MPI and NCCL read these variables once.
    if not _is_on(AUTOTUNE_VARIABLE):
        os.environ.setdefault(FUSION_VARIABLE, "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    _set_crowded_defaults()
    _check_restart()
    _set_mpi_prefix()
    # Before Horovod starts, so that a start which waits for a rank is watched, too.
    watchdog.watch(stall_timeout)
    if stages == tensor == 1:
        grid.set_current(None)
        hvd.init(*args, **kwargs)
    else:
        kwargs = _init_grid(stages, tensor, **kwargs)
    _state.started = True
    if hvd.mpi_enabled():
        mpi.note_ranks(args[0] if args else kwargs.get("comm"))
    # After the start, which tells how many ranks are on this host, and when all of them have been bound to their CPUs.
    if THREADS not in os.environ:
        sharing = _sharing(grid.current().local_size)
        torch.set_num_threads(threads_per_rank(sharing))
    if not repeatable() and not _state.warned and hvd.rank() == 0:
        _state.warned = True
        run_warnings.warn(
            f"{_fusion_reason()}: results are right, but two runs need not agree bit for bit "
            f"(unset it, or set {FUSION_VARIABLE}=0, for repeatable runs)."
        )


def _show_uncaught_errors() -> None:
    """Has :mod:`.uncaught` show errors that nobody catches, unless something else than Python shows them."""
    interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    hook = sys.excepthook
    # On Python 3.10, the backport of exception groups has replaced Python's own where anything has imported it: anyio, say, and
    # with it transformers. It adds groups to the module traceback as well, which show() uses.
    is_pythons = hook == sys.__excepthook__ or getattr(hook, "__module__", "") == "exceptiongroup._formatting"
    if is_pythons and not interactive:
        sys.excepthook = functools.partial(_show, hook)


def _show(
    pythons: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    from hvd_ckpt.processes import uncaught

    if launched_rank() is None and not uncaught.says_what_it_interrupted(error):
        pythons(kind, error, trace)
    else:
        uncaught.show(error)


def _init_grid(stages: int, tensor: int, **kwargs: Any) -> dict[str, Any]:
    """Starts Horovod as one world per pipeline stage and part; returns its keyword arguments."""
    from hvd_ckpt.processes import device_link, links, mpi  # most jobs have neither stages nor parts

    grid, comm, world = links.enter(stages, mpi.import_mpi if _starts_over_mpi() else None, tensor)
    if comm is not None:
        kwargs["comm"] = comm
    device_link.add_links(grid)
    # Horovod reads rank and size from the environment as it starts: those of the stage's own world. Afterwards they are those of
    # the whole job again, as in launched_rank().
    before = {name: os.environ[name] for name in world if name in os.environ}
    os.environ.update(world)
    try:
        hvd.init(**kwargs)
    finally:
        for name in world:
            del os.environ[name]
        os.environ.update(before)
    return kwargs


def _starts_over_mpi() -> bool:
    """Whether Horovod will run over MPI: it does where it can, unless the launcher says otherwise."""
    return os.environ.get("HOROVOD_CONTROLLER", "").lower() != "gloo" and bool(hvd.mpi_built())


def repeatable() -> bool:
    """Whether runs can repeat bit for bit: Horovod's fusion is off and nothing tunes it."""
    return not _fusion_reason()


def _set_crowded_defaults() -> None:
    """Keeps ranks that wait from disturbing ranks that compute, where they share CPUs."""
    local_size, cpus = _launched_local_size(), allowed_cpus()
    # Ranks that have not started yet count as sharing.
    ranks = _sharing(local_size)
    if 2 * ranks <= cpus or local_size == 1:
        return
    if not _is_on(AUTOTUNE_VARIABLE) and _restarts_with_both_set():
        os.environ.setdefault(CYCLE, str(CYCLE_MILLISECONDS * max(1, ranks // cpus)))
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _sharing(ranks: int) -> int:
    """How many of so many ranks of this host may run on CPUs that this one may run on: all, unless it is bound to some."""
    if ranks == 1 or not hasattr(os, "sched_getaffinity") or allowed_cpus() == os.cpu_count():
        return ranks
    from hvd_ckpt.processes.ancestry import ranks_sharing_cpus

    return ranks_sharing_cpus(ranks)


def _check_restart() -> None:
    """Refuses a second start in which Horovod would end the process, in an elastic job at the first start already.

    Raises:
        RuntimeError: both variables are set, and this Horovod cannot start again with them.
    """
    both = FUSION_VARIABLE in os.environ and CYCLE in os.environ
    if both and not _restarts_with_both_set() and (_state.started or is_elastic()):
        raise RuntimeError(
            f"init(): {CYCLE}={os.environ[CYCLE]} and {FUSION_VARIABLE}={os.environ[FUSION_VARIABLE]} are "
            f"both set, with which this build of Horovod cannot start again after shutdown(): unset {CYCLE}, or use "
            "the Horovod that `hvd-ckpt build-horovod` builds."
        )


def _restarts_with_both_set() -> bool:
    """Whether Horovod can start twice in a process with its fusion threshold and its cycle time set (or never does: over MPI).

    Released as 0.28.1, it writes through a null pointer: the vector of parameters that it may tune is empty.
    """
    return _starts_over_mpi() or hasattr(hvd.mpi_ops._basics.MPI_LIB_CTYPES, RESTARTS_SYMBOL)


def _launched_local_size() -> int:
    """Number of ranks that the launcher has started on this machine; 1 if no known launcher has."""
    number = first_whole(LOCAL_SIZE_VARIABLES)
    return 1 if number is None else number


def _set_mpi_prefix() -> None:
    """Tell a relocated Open MPI where it is; ``mpirun`` does so for the ranks it starts."""
    prefix = Path(sys.prefix)
    has_open_mpi = (prefix / "bin" / "orted").exists() and any((prefix / "lib").glob("libmpi.*"))
    if has_open_mpi and MPI_PREFIX_VARIABLE not in os.environ:
        os.environ[MPI_PREFIX_VARIABLE] = str(prefix)


def _fusion_reason() -> str:
    """The setting that lets Horovod fuse tensors by arrival time, as ``NAME=value``, or an empty string."""
    if _is_on(AUTOTUNE_VARIABLE):
        return f"{AUTOTUNE_VARIABLE}={os.environ[AUTOTUNE_VARIABLE]}"
    if FUSION_VARIABLE not in os.environ:
        return "" if not hvd.is_initialized() else f"{FUSION_VARIABLE} unset when Horovod started"
    return f"{FUSION_VARIABLE}={os.environ[FUSION_VARIABLE]}" if _is_on(FUSION_VARIABLE) else ""


def _is_on(variable: str) -> bool:
    """Whether Horovod reads the variable as a number above zero (it parses with C's strtol)."""
    return re.match(r"\s*\+?0*[1-9]", os.environ.get(variable, "")) is not None


def allowed_cpus() -> int:
    """Number of CPUs that this process may run on: its affinity mask where the system has one, else all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(sharing: int) -> int:
    """CPU threads for each of so many ranks that share the CPUs of this process: its share of them, at least 1."""
    return max(1, allowed_cpus() // sharing)


def controller() -> str:
    """The controller of this job: ``"mpi"`` or ``"gloo"``.

    Raises:
        ValueError: Horovod is not initialized.
    """
    require_initialized("controller()")
    return "mpi" if hvd.mpi_enabled() else "gloo"
