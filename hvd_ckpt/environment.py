"""Numbers in environment variables, which anything may have set."""

from __future__ import annotations

import math
import os

__all__ = ["check_environment", "whole_in"]

COUNTS = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
THREADS = "OMP_NUM_THREADS"
CYCLE = "HOROVOD_CYCLE_TIME"


def whole_in(variable: str) -> int | None:
    """The whole number from 0 in a variable; None if it holds none."""
    return _whole(os.environ.get(variable, ""))


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
    if cycle is not None and not _is_time(cycle):
        raise _wrong(CYCLE, "give milliseconds above 0, or unset it")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _wrong(variable: str, way_out: str) -> ValueError:
    return ValueError(f"{variable} is {ascii(os.environ[variable])[:60]}: {way_out}")
