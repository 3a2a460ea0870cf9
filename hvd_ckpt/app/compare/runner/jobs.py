"""Jobs: ranks that a launcher starts together on this machine, with their settings and the result of each.

A job has one folder: ``job.json``, ``log.txt`` with the output of all ranks, ``rank0.json``, ``rank1.json``, ... with the results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.launchers import launched_rank, whole_in
from hvd_ckpt.processes.probe import launcher_environment
from hvd_ckpt.utils.extras import explain_import_error
from hvd_ckpt.utils.plain_data import write_text

if TYPE_CHECKING:
    import torch

LONGEST_REASON = 300
RANK = "hvd_ckpt.app.compare.runner.rank"  # the program of each rank

R = TypeVar("R")


class JobError(Exception):
    """A job ended without a result of every rank; the message says why in one line."""


@dataclass(frozen=True)
class RankJob:
    """Ranks that are started together. Subclasses are frozen dataclasses whose fields JSON can hold.

    Attributes:
        worker: the function that each rank calls, as ``module:function``; it takes the job and returns the result of the rank.
        ends_at_once: a rank whose result is written ends without the orderly end of what it has loaded.
        folder: of this job alone.
        size: number of ranks.
    """

    worker: ClassVar[str]
    ends_at_once: ClassVar[bool] = False

    folder: Path
    size: int

    @property
    def file(self) -> Path:
        """The job, for the ranks to read."""
        return self.folder / "job.json"

    @property
    def log_file(self) -> Path:
        """The output of the launcher and all ranks."""
        return self.folder / "log.txt"

    def result_file(self, rank: int) -> Path:
        """The result of a rank."""
        return self.folder / f"rank{rank}.json"

    def error_file(self, rank: int) -> Path:
        """The error that ended a rank, in one line."""
        return self.folder / f"rank{rank}.error"

    def save(self) -> None:
        """Makes the folder and writes :attr:`file`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_json(self, self.file)


def save_json(value: Any, file: Path) -> None:
    """Writes a dataclass or a list of such; losses and differences may be infinite."""
    write_text(to_json(value, inf_nan_mode="constants").decode() + "\n", file)


def load_json(kind: type[R], file: Path) -> R:
    """The value of that type that :func:`save_json` wrote."""
    return TypeAdapter(kind).validate_json(file.read_bytes())


def rank_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of every rank: this process's, with the same number of CPU threads for all engines if one is given."""
    return launcher_environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def launch_command(
    size: int, controller: str, module: str, *arguments: object, options: Sequence[str] = ()
) -> list[str]:
    """The command that starts ``python -m module arguments`` on ``size`` ranks of this machine, with ``options`` of horovodrun."""
    launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(size), f"--{controller}", *options]
    return [*launcher, sys.executable, "-m", module, *map(str, arguments)]


def run_job(
    job: RankJob,
    result: type[R],
    controller: str,
    timeout: float,
    *,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[R]:
    """Runs a job and returns the result of each rank, in rank order.

    Args:
        job: the job; its folder is made.
        result: the type of what the worker returns: a dataclass, or a list or dict of such.
        controller: ``gloo`` or ``mpi``.
        timeout: seconds after which the job is ended.
        threads: CPU threads of each rank; None leaves that to the ranks.
        environment: further variables of the ranks.
        within: the words of a command that runs the launcher, which follows them.
        options: of the launcher.

    Raises:
        JobError: a rank failed, or the job took longer than ``timeout`` seconds.
    """
    job.save()
    variables = {**rank_environment(threads), **(environment or {})}
    command = [*within, *launch_command(job.size, controller, RANK, job.worker, job.file, options=options)]
    results = [job.result_file(rank) for rank in range(job.size)]
    errors = [job.error_file(rank) for rank in range(job.size)]
    run_command(command, job.log_file, variables, timeout, results, errors)
    return [load_json(result, file) for file in results]


def run_command(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    timeout: float,
    results: Sequence[Path] = (),
    errors: Sequence[Path] = (),
) -> None:
    """Runs a command with its output in a log.

    Args:
        results: files that it has to leave.
        errors: files where it may say what went wrong; the oldest counts. By default its log does.

    Raises:
        JobError: it failed, or took longer than ``timeout`` seconds.
    """
    with Process(command, log, environment) as process:
        status = process.wait(timeout)
    if status is None:
        raise JobError(f"no end after {timeout:.0f} s (log: {log})")
    if status != 0 or not all(file.exists() for file in results):
        left = [file for file in errors if file.exists()]
        told = min(left, key=lambda file: file.stat().st_mtime_ns).read_text() if left else error_line(log)
        raise JobError(f"{told} (status {status}, log: {log})")


def own_device(kind: str) -> torch.device:
    """The device of this rank: the CPU, or for ``cuda`` the GPU of its number, which becomes PyTorch's current one."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    # With more ranks than GPUs they share one, which a Horovod that stages through the host allows.
    device = torch.device("cuda", (launched_rank() or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def launched_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher says: Horovod's over Gloo, or Open MPI.

    Raises:
        RuntimeError: no launcher that sets them started this process.
    """
    for names in (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        rank, size = map(whole_in, names)
        if rank is not None and size is not None:
            return rank, size
    raise RuntimeError("this process has no rank: start it with horovodrun or mpirun")


def join_torch(folder: Path, device: torch.device | None = None) -> None:
    """Makes this process a rank of ``torch.distributed``, over Gloo, and over NCCL for tensors of a GPU.

    Args:
        folder: of the job.
        device: of this rank, if that is a GPU.
    """
    import torch

    rank, size = launched_rank_and_size()
    torch.distributed.init_process_group(
        "gloo" if device is None or device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=size,
    )


def reason(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text; a missing package with the way to get it."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        return explain_import_error(error) or f"{error.name} is not installed"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."
