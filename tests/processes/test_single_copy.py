"""Where ranks cannot read each other's memory, as in a container, Open MPI is told so before it complains."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SYSTEM_CALL = {"x86_64": 310, "aarch64": 270}  # process_vm_readv

# A filter of seccomp, as of Docker: this system call is answered with EPERM, and all others are allowed.
FORBID = """
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
NO_NEW_PRIVILEGES, SECCOMP = 38, 22
if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
    sys.exit(77)
if libc.prctl(SECCOMP, 2, ctypes.byref(Filter(len(rules), ctypes.addressof(program))), 0, 0):
    sys.exit(77)
from hvd_ckpt.processes.mpi import SINGLE_COPY, set_single_copy
for environment in ({}, {SINGLE_COPY: "cma"}):
    set_single_copy(environment)
    print(environment[SINGLE_COPY])
"""


def test_open_mpi_copies_twice_only_where_it_must() -> None:
    number = SYSTEM_CALL.get(platform.machine())
    if number is None:
        pytest.skip("the number of the system call is not known here")
    command = [sys.executable, "-c", FORBID, str(number)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode == 77:
        pytest.skip("seccomp does not work here")
    assert result.stdout.split() == ["none", "cma"], result.stderr
