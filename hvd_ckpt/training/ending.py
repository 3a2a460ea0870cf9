"""The end of a run: requests to stop, errors that one rank raises on all, reports of single ranks, and how processes exit.

A handler only notes a signal. The loop looks for a request in every step, and tells the other ranks by a flag that travels with the
gradients (:meth:`~hvd_ckpt.reduction.optimizer.ReducedOptimizer.notify`), as for a loss that is not finite. Only then do all ranks
gather their reports, so it costs nothing until there is one; all stop after the same step, with a snapshot.

When a rank fails, all ranks exit, and one of them says why (:mod:`hvd_ckpt.uncaught`). Nobody waits: a process that has failed
exits without Horovod's orderly shutdown, in which it would wait for ranks that compute, and the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set
from torch import nn
from typing_extensions import Self

from hvd_ckpt import uncaught
from hvd_ckpt.grid import current
from hvd_ckpt.hosts import host_name
from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.reduction.agreement import (
    FailedElsewhere,
    allgather_objects,
    broadcast_from,
    raise_first_failure,
)
from hvd_ckpt.reduction.consistency import WeightsDiffer, check_equal_weights
from hvd_ckpt.snapshots.reader import SnapshotError
from hvd_ckpt.snapshots.writer import EXIT_SECONDS
from hvd_ckpt.training.config import ConfigError
from hvd_ckpt.training.supervise import FAILURE_FILE, SIGNALS, STOP_FILE, SUPERVISED_VARIABLE

DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
LOOK_SECONDS = 1.0  # between two looks for the file, which may be on a slow file system
MOMENT = EXIT_SECONDS + 2  # in which rank 0 has closed its files

# ------------------------------------------------------------------------------------ requests to stop


class StopRequest:
    """Notes requests to stop while its context is entered. A program's own signal handlers stay in place.

    A second Ctrl-C interrupts at once.

    Args:
        folder: of the run, on the rank that looks for ``stop`` in it; None on the others.
        reason: an earlier request.
    """

    def __init__(self, folder: Path | None, reason: str | None = None) -> None:
        self._file = None if folder is None else folder / STOP_FILE
        self._looked = 0.0
        self._reason = reason
        self._replaced: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """The signal's name, ``"stop"`` for the file, or None without a request."""
        if self._reason is None and self._file is not None:
            now = time.monotonic()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                if os.path.exists(self._file):  # false as well where the file system has trouble
                    self._reason = STOP_FILE
        return self._reason

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in DEFAULTS:
                    self._replaced[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def acknowledge(self) -> None:
        """Removes the file: the run has stopped."""
        if self._file is not None:
            forget_file(self._file.parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._reason is not None:
            raise KeyboardInterrupt
        self._reason = signal.Signals(number).name


def forget_file(folder: Path) -> None:
    """Removes the file from a run's folder, if it is there: it was for a run that has ended."""
    with contextlib.suppress(OSError):
        (folder / STOP_FILE).unlink()


def status_of(reason: str | None) -> int:
    """The exit status of a run that has stopped for that reason: as a shell has it, or 0 for the file or none."""
    return 0 if reason in (None, STOP_FILE) else 128 + signal.Signals[reason]


# ------------------------------------------------------------------------------------ errors of one rank, on all


class FatalTrainingError(RuntimeError):
    """Training ends, and would end the same way again; one line, raised on every rank."""


class NonFiniteLoss(FatalTrainingError):
    """A rank's loss is nan or infinite."""


FATAL_ERRORS = (FatalTrainingError, WeightsDiffer, SnapshotError)  # raised on all ranks alike


@contextlib.contextmanager
def errors_everywhere(name: str) -> Iterator[None]:
    """An error that one rank raises inside is raised on all ranks. The body must not communicate, since a rank may leave it early.

    Raises:
        ConfigError: a ValueError inside, on this rank or another.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        raise_first_failure(error, of_all_processes(None if error is None else str(error), name))
    except ValueError as found:
        passing = isinstance(found, (FailedElsewhere, SnapshotError)) or getattr(found, "passing", False)
        raise ConfigError(str(found), passing) from None


def of_all_processes(value: Any, name: str) -> list[Any]:
    """A picklable value of each process of the job, of all pipeline stages, in the order of their numbers. Collective."""
    replicas = allgather_objects(value, global_process_set, name)
    if current().stages == 1:
        return replicas
    return [one for stage in current().gather_objects(replicas) for one in stage]


def of_first_process(value: Any, name: str) -> Any:
    """The first process's value, on all processes of all pipeline stages. Collective."""
    first = broadcast_from(value, 0, global_process_set, name)
    return first if current().stages == 1 else current().gather_objects(first)[0]


def check_weights(model: nn.Module) -> None:
    """Compares the weights of the ranks, on each pipeline stage its own. Collective.

    Raises:
        WeightsDiffer: some differ; on every rank of every stage.
    """
    if current().stages == 1:
        check_equal_weights(model)
        return
    try:
        check_equal_weights(model)
        found = None
    except WeightsDiffer as error:
        found = f"pipeline stage {current().stage}: {error}"
    for text in of_all_processes(found, "hvd_ckpt.train.weights"):
        if text is not None:
            raise WeightsDiffer(text)


def gather_reports(stop: str | None, loss: float | None, step: int) -> tuple[str | None, str | None]:
    """The first request to stop, and the ranks whose losses are not finite, in words; None for neither. Collective.

    Args:
        stop: the request that this rank has received, or None.
        loss: this rank's, if that is not finite.
        step: of the loss, counted from 1.
    """
    reports: list[tuple[str | None, float | None, str]] = of_all_processes(
        (stop, loss, host_name()), "hvd_ckpt.train.reports"
    )
    request = next((stop for stop, _, _ in reports if stop is not None), None)
    reports = reports[: hvd.size()]  # the stages of a replica have the same loss
    found = [(rank, loss, host) for rank, (_, loss, host) in enumerate(reports) if loss is not None]
    if not found:
        return request, None
    rank, loss, host = found[0]
    others = f" (and on {len(found) - 1} more of {len(reports)} ranks)" if len(found) > 1 else ""
    return request, f"step {step}: the loss is {loss} on rank {rank}, host {host}{others}"


# ------------------------------------------------------------------------------------ exit


@contextlib.contextmanager
def exit_handler(folder: Path | None = None) -> Iterator[None]:
    """Exits the process, with status 1, when its body raises; 130 for Ctrl-C. For the outermost call of a command.

    ``SystemExit`` and ``ConfigError``, which a command reports in its own way, pass.

    Args:
        folder: of the run. Where a supervisor has started the ranks, an error that would come again is written there for it, as
            ``failure.txt``.
    """
    try:
        yield
    except SystemExit:
        raise
    except ConfigError as error:
        if not error.passing:
            _write_failure_file(folder, error)
        raise
    except KeyboardInterrupt:
        exit_now(130)
    except BaseException as error:
        missing = explain_import_error(error) if isinstance(error, ImportError) else None
        if missing or isinstance(error, FATAL_ERRORS):
            if _rank() != 0:  # once a rank has exited, the launcher leaves the others no time
                time.sleep(MOMENT)
            elif isinstance(error, (FatalTrainingError, WeightsDiffer)):
                _write_failure_file(folder, error)
            if missing or _rank() == 0:
                with contextlib.suppress(OSError, ValueError):
                    print(f"Error: {missing or error}", file=sys.stderr, flush=True)
        else:
            uncaught.show(error)
        exit_now(2 if missing else 1)


def exit_now(status: int) -> NoReturn:
    """Exits this process without the interpreter's own clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _write_failure_file(folder: Path | None, error: Exception) -> None:
    if folder is not None and _rank() == 0 and os.environ.get(SUPERVISED_VARIABLE) == "1":
        with contextlib.suppress(OSError):
            (folder / FAILURE_FILE).write_text(f"{error}\n", "utf-8")


def _rank() -> int:
    """This process's number in the job."""
    return current().number if hvd.is_initialized() else 0
