"""Launchers: the environment variables that they set."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

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


def is_elastic() -> bool:
    """True in a job of Horovod Elastic, where ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"
