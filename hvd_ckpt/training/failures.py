"""Failures of a run: errors that one rank raises on all, reports of single ranks, and how processes exit.

While a run trains, a flag that travels with the gradients (:meth:`~hvd_ckpt.reduction.optimizer.ReducedOptimizer.notify`) says
that a rank has something to report, and only then do all ranks gather their reports; it costs nothing until there is one.

When a rank fails, all ranks exit, and one of them says why. The rank where it happened shows its traceback. The others find that it
has gone (Horovod's collectives fail), or get the error from it; each says so in one line. Nobody waits: a process that has failed
exits without Horovod's orderly shutdown, in which it would wait for ranks that compute, and the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
from horovod.torch.mpi_ops import global_process_set

from hvd_ckpt import watchdog
from hvd_ckpt.hosts import host_name
from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.reduction.agreement import FailedElsewhere, allgather_objects, raise_together
from hvd_ckpt.reduction.consistency import WeightsDiffer
from hvd_ckpt.snapshots.reader import SnapshotError
from hvd_ckpt.snapshots.writer import EXIT_SECONDS
from hvd_ckpt.training.config import ConfigError
from hvd_ckpt.training.stopping import FAILURE_FILE, SUPERVISED_VARIABLE

MOMENT = EXIT_SECONDS + 2  # in which rank 0 has closed its files


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
        raise_together(error, global_process_set, name)
    except ValueError as found:
        passing = isinstance(found, (FailedElsewhere, SnapshotError)) or getattr(found, "passing", False)
        raise ConfigError(str(found), passing) from None


def gather_reports(stop: str | None, loss: float | None, step: int) -> tuple[str | None, str | None]:
    """The first request to stop, and the ranks whose losses are not finite, in words; None for neither. Collective.

    Args:
        stop: the request that this rank has received, or None.
        loss: this rank's, if that is not finite.
        step: of the loss, counted from 1.
    """
    reports: list[tuple[str | None, float | None, str]] = allgather_objects(
        (stop, loss, host_name()), global_process_set, "hvd_ckpt.train.reports"
    )
    request = next((stop for stop, _, _ in reports if stop is not None), None)
    found = [(rank, loss, host) for rank, (_, loss, host) in enumerate(reports) if loss is not None]
    if not found:
        return request, None
    rank, loss, host = found[0]
    others = f" (and on {len(found) - 1} more of {len(reports)} ranks)" if len(found) > 1 else ""
    return request, f"step {step}: the loss is {loss} on rank {rank}, host {host}{others}"


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
    except FATAL_ERRORS as error:
        if _rank() != 0:  # once a rank has exited, the launcher leaves the others no time
            time.sleep(MOMENT)
        elif not isinstance(error, SnapshotError):
            _write_failure_file(folder, error)
        if _rank() == 0:
            _say(f"Error: {error}")
        exit_now(1)
    except FailedElsewhere as error:
        _say(f"{_who()}: ended with the others: {error}")
        exit_now(1)
    except hvd.HorovodInternalError:
        lost = watchdog.lost_hosts()
        _say(f"{_who()}: ended, because another rank has gone{': ' if lost else ''}{lost}")
        exit_now(1)
    except BaseException as error:
        missing = explain_import_error(error) if isinstance(error, ImportError) else None
        if missing:
            if _rank() != 0:  # as above
                time.sleep(MOMENT)
            _say(f"Error: {missing}" if _rank() == 0 else f"{_who()}: {missing}")
            exit_now(2)
        _say(f"{_who()}: ended by this error:\n{traceback.format_exc().rstrip()}")
        exit_now(1)


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
    return int(hvd.rank()) if hvd.is_initialized() else 0


def _who() -> str:
    if not hvd.is_initialized():
        return f"process {os.getpid()} on host {host_name()}"
    return f"rank {hvd.rank()} on host {host_name()}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
