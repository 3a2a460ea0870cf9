"""Open MPI's single copy of messages within a host, which is turned off if the system does not allow it.

Open MPI 4 reads large messages from the memory of the rank that sends them. Most containers do not allow this. Open MPI then
prints ``Read -1, expected 1198612, errno = 1`` for each message and copies twice.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import subprocess
from collections.abc import MutableMapping

VARIABLE = "OMPI_MCA_btl_vader_single_copy_mechanism"


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def set_default(environment: MutableMapping[str, str]) -> None:
    """Lets the ranks that get this environment copy twice without a message, where they cannot read each other's memory."""
    if VARIABLE not in environment and not is_allowed():
        environment[VARIABLE] = "none"


@functools.cache
def is_allowed() -> bool:
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
