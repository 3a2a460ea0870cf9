"""Jobs: ranks that a launcher starts together on this machine, with their settings and what each of them tells.

A job has one folder: ``job.json``, ``log.txt`` with the output of all ranks, and the events of each rank in ``rank0.jsonl``, ...:
JSON lines with the rank, the time, and what happened. Every rank (:mod:`.rank`) tells

    born (pid)         its process has begun
    done (value)       its worker has returned this value
    error (message)    its worker has raised this error, which ends the process

and a worker may tell more in between. :func:`follow` reads the files while they grow.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json
from typing_extensions import Self

from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.launchers import launched_rank, launched_size
from hvd_ckpt.processes.probe import launcher_environment
from hvd_ckpt.utils.extras import explain_import_error, first_line
from hvd_ckpt.utils.plain_data import write_text

if TYPE_CHECKING:
    import torch

GRACE_SECONDS = 0.5  # after an error on one rank, for the others to end by themselves
POLL_SECONDS = 0.05
RANK = "hvd_ckpt.app.compare.runner.rank"  # the program of each rank

R = TypeVar("R")
Event = dict[str, Any]


class JobError(Exception):
    """A job ended without a result of every rank; the message says why in one line, and ``kind`` is ``error`` or ``hang``."""

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class RankJob:
    """Ranks that are started together. Subclasses are frozen dataclasses whose fields JSON can hold.

    Attributes:
        worker: the function that each rank calls, as ``module:function``; it takes the job and returns the result of the rank.
    """

    worker: ClassVar[str]

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

    def save(self) -> None:
        """Makes the folder and writes :attr:`file`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(to_json(self, inf_nan_mode="constants").decode() + "\n", self.file)

    @classmethod
    def load(cls, file: Path) -> Self:
        """The job that :meth:`save` wrote."""
        return TypeAdapter(cls).validate_json(file.read_bytes())

    def tell(self, event: str, **values: Any) -> None:
        """Writes an event of this rank; losses and differences in it may be infinite."""
        rank = launched_rank() or 0
        line = {"event": event, "rank": rank, "time": time.time(), **values}
        with (self.folder / f"rank{rank}.jsonl").open("ab") as stream:
            stream.write(to_json(line, inf_nan_mode="constants") + b"\n")


class EventReader:
    """Reads the events that the ranks of one job have written since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """New events of all ranks, oldest first; a line that is not finished yet waits for the next call."""
        events: list[Event] = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as stream:
                stream.seek(self._read.get(path, 0))
                text = stream.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            events += [json.loads(line) for line in complete.splitlines()]
        return sorted(events, key=lambda event: float(event["time"]))


def follow(
    statuses: Callable[[], Sequence[int | None]],
    job: RankJob,
    limit: Callable[[Sequence[Event]], float],
    listener: Callable[[Event], object] = lambda event: None,
) -> tuple[list[Event], JobError | None]:
    """Follows a job to its end, or to a reason to end it; returns all events, and what went wrong.

    Args:
        statuses: of the processes, None of those that run.
        limit: takes the events so far to the seconds that all ranks may be silent now.
    """
    reader, events = EventReader(job.folder), list[Event]()
    last, failing = time.monotonic(), False
    while True:
        # Before the events are read: what a rank wrote just before its end would be missed otherwise.
        found = statuses()
        status = next((status for status in found if status), 0)
        new = reader.new()
        for event in new:
            listener(event)
        events += new
        if new:
            last = time.monotonic()
        quiet, longest = time.monotonic() - last, limit(events)
        failing = failing or status != 0 or any(event["event"] == "error" for event in new)
        # One rank's error leaves the others waiting in a collective. They get a moment to say what went wrong for them.
        if None not in found or (failing and quiet > GRACE_SECONDS):
            return events, _failure(events, job, status)
        if not failing and quiet > longest:
            return events, JobError(f"no rank did a step for {longest:.0f} s; {_whereabouts(events)}", "hang")
        time.sleep(POLL_SECONDS)


def ranks_at(events: Sequence[Event], name: str) -> int:
    """How many ranks have told an event."""
    return len({event["rank"] for event in events if event["event"] == name})


def _failure(events: Sequence[Event], job: RankJob, status: int) -> JobError | None:
    # The first error by its time is the cause. Other ranks fail after it, in collectives that it has left.
    for event in events:
        if event["event"] == "error":
            return JobError(event["message"])
    if status:
        return JobError(f"a rank ended with status {status}: {error_line(job.log_file)}")
    if ranks_at(events, "done") < job.size:
        return JobError(f"the ranks ended before they were done: {error_line(job.log_file)}")
    return None


def _whereabouts(events: Sequence[Event]) -> str:
    """The last event of each rank, such as ``rank 0 after step 2, rank 1 after ready``."""
    last = {event["rank"]: event for event in events}
    places = [
        f"rank {rank} after {event['event']}" + (f" {event['step']}" if "step" in event else "")
        for rank, event in sorted(last.items())
    ]
    return ", ".join(places) or "no rank has started"


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
        result: the type of what the worker returns: a dataclass, or a list or dict of such.
        timeout: seconds without an event of any rank, after which the job is ended.
        threads: CPU threads of each rank; None leaves that to the ranks.
        within: the words of a command that runs the launcher, which follows them.

    Raises:
        JobError: a rank failed, or none told anything for ``timeout`` seconds.
    """
    job.save()
    variables = {**rank_environment(threads), **(environment or {})}
    command = [*within, *launch_command(job.size, controller, RANK, job.worker, job.file, options=options)]
    with Process(command, job.log_file, variables) as process:
        events, failure = follow(lambda: [process.status], job, lambda events: timeout)
    if failure is not None:
        raise JobError(f"{failure} (log: {job.log_file})", failure.kind)
    values = {event["rank"]: event["value"] for event in events if event["event"] == "done"}
    return [TypeAdapter(result).validate_python(values[rank]) for rank in sorted(values)]


def own_device(kind: str) -> torch.device:
    """The device of this rank: the CPU, or for ``cuda`` the GPU of its number, which becomes PyTorch's current one."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    # With more ranks than GPUs they share one, which a Horovod that stages through the host allows.
    device = torch.device("cuda", (launched_rank() or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_torch(folder: Path, device: torch.device | None = None) -> None:
    """Makes this process a rank of ``torch.distributed``, over Gloo, and over NCCL for tensors of a GPU."""
    import torch

    torch.distributed.init_process_group(
        "gloo" if device is None or device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=launched_rank() or 0,
        world_size=launched_size(),
    )


def reason(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text; of a missing package the way to get it."""
    explained = explain_import_error(error) if isinstance(error, ImportError) else None
    return explained or f"{type(error).__name__}: {first_line(error)}"
