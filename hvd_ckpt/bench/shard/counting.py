"""Bytes, counted in ways that are the same for every contender.

Of tensors: their storages, each once. Of the heap: what the C library's allocator has given out, to whatever thread and library
(``mallinfo2`` of glibc), so that buffers of communication threads count, too. Of the resident set: what Linux keeps. Sent: what the
TCP connections of this process have delivered, by the kernel's own count. Asked: what a contender's calls of collectives must send
if each is done in the best way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = [
    "HeapPeak", "asked", "heap_bytes", "heap_peak", "peak_resident_bytes", "resident_bytes", "return_memory", "sent_bytes",
    "start_resident_peak", "storage_bytes",
]  # fmt: skip

MAPS = Path("/proc/self/maps")
STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")
BETWEEN_LOOKS = 0.0005  # seconds
DELIVERED = 120  # where struct tcp_info has tcpi_bytes_acked
ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8}


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> tuple[int, int]:
    """Bytes of the tensors' storages in memory, and in mapped files.

    Each storage counts whole, and once: those whose addresses are in ``seen`` do not, and the others' are added to it.
    """
    memory = files = 0
    mapped = _mapped_files()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            if any(start <= address < end for start, end in mapped):
                files += storage.nbytes()
            else:
                memory += storage.nbytes()
    return memory, files


def _mapped_files() -> list[tuple[int, int]]:
    """First address and end of each part of a file that is mapped into this process."""
    try:
        lines = [line.split(maxsplit=5) for line in MAPS.read_text().splitlines()]
    except OSError:
        return []
    places = [place.split("-") for place, _, _, _, inode, *_ in lines if inode != "0"]
    return [(int(start, 16), int(end, 16)) for start, end in places]


# ---------------------------------------------------------------------------------------------------------------- memory


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


try:
    _mallinfo: Callable[[], Any] | None = ctypes.CFUNCTYPE(_MallocInfo)(("mallinfo2", ctypes.CDLL(None)))
except (AttributeError, OSError):  # another C library
    _mallinfo = None


def heap_bytes() -> int | None:
    """Bytes that the C library's allocator has given out; None where it does not tell."""
    if _mallinfo is None:
        return None
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def return_memory() -> None:
    """Gives freed memory back to the system, where the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class HeapPeak:
    """The most bytes of the heap that were seen; None where it does not tell."""

    bytes: int | None


@contextlib.contextmanager
def heap_peak() -> Iterator[HeapPeak]:
    """Looks at the heap two thousand times a second, in a thread of its own."""
    peak = HeapPeak(heap_bytes())
    over = threading.Event()

    def look() -> None:
        while not over.wait(BETWEEN_LOOKS):
            now = heap_bytes()
            assert now is not None and peak.bytes is not None
            peak.bytes = max(peak.bytes, now)

    looker = threading.Thread(target=look, daemon=True)
    if peak.bytes is not None:
        looker.start()
    try:
        yield peak
    finally:
        over.set()
        if looker.ident is not None:
            looker.join()


def resident_bytes() -> int | None:
    """The resident set; None where there is no Linux."""
    return _status("VmRSS")


def start_resident_peak() -> None:
    """Begins to look for the peak of the resident set anew, where the kernel lets us."""
    with contextlib.suppress(OSError):
        CLEAR_PEAK.write_text("5")


def peak_resident_bytes() -> int | None:
    """The most that the resident set has been since :func:`start_resident_peak`; None where there is no Linux."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


# ---------------------------------------------------------------------------------------------------------------- network


def sent_bytes() -> int | None:
    """What this process has sent over its open TCP connections and the other ends have received; None where there is no Linux."""
    if not hasattr(socket, "TCP_INFO") or not Path("/proc/self/fd").exists():
        return None
    return sum(_delivered(int(name)) for name in os.listdir("/proc/self/fd"))


def _delivered(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed in the meantime, or no connection
        return 0
    return int(struct.unpack_from("Q", info, DELIVERED)[0]) if len(info) >= DELIVERED + 8 else 0


def asked(work: Callable[[], object], ranks: int) -> int:
    """Bytes that each rank must send for the collectives of ``torch.distributed`` over Gloo that ``work`` calls, on average.

    Of n ranks an allreduce must send 2 (n - 1) / n of what is reduced, a reduce-scatter, allgather, broadcast or reduce (n - 1) / n
    of the whole. Gloo does a reduce-scatter as an allreduce; it is counted as what it was asked for.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    part = (ranks - 1) / ranks
    total = 0.0
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "c10d::_reduce_scatter_base_":  # what follows is one allreduce of the same bytes
            total -= part * _bytes(event.shapes()[1:2], event.dtypes()[1:2])
        elif name.startswith("gloo:"):
            sent = _bytes(event.shapes(), event.dtypes())
            total += sent * {"gloo:all_reduce": 2 * part, "gloo:all_gather": ranks - 1}.get(name, part)
    return round(total)


def _bytes(shapes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    return sum(
        torch.Size(shape).numel() * ITEM_BYTES.get(dtype, 4) for shape, dtype in zip(shapes, dtypes) if dtype
    )
