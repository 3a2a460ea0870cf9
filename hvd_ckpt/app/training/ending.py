"""The end of a run: errors that are raised on all ranks, reports of single ranks, and the exit of processes.

In every step the loop checks for a request to stop and for a loss that is not finite. A flag that is sent with the gradients
(:meth:`~hvd_ckpt.reduction.optimizer.ReducedOptimizer.notify`) informs the other ranks. Only if it is set do all ranks gather
their reports, so the check costs nothing. All stop after the same step, with a snapshot.

When a rank fails, all ranks exit, and one on each host prints the traceback (:mod:`hvd_ckpt.processes.uncaught`). A process that
has failed exits without Horovod's orderly shutdown, which would wait for ranks that compute, and the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import horovod.torch as hvd

from hvd_ckpt.app.training.config import Config, ConfigError, config_errors
from hvd_ckpt.collectives.agreement import errors_on_all, of_all_processes
from hvd_ckpt.processes import uncaught
from hvd_ckpt.processes.grid import current, host_name
from hvd_ckpt.processes.stopping import StopRequest
from hvd_ckpt.reduction.consistency import WeightsDiffer
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.writer import EXIT_SECONDS
from hvd_ckpt.utils.extras import explain_import_error

MOMENT = EXIT_SECONDS + 2  # in which rank 0 has closed its files

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
    with config_errors(), errors_on_all(name):
        yield


class Reports:
    """Reports of single ranks, on which all ranks act after the same step: a request to stop, or a loss that is not finite.

    With local SGD, ranks do not communicate in a step, so reports wait for the next entry of the log.

    Attributes:
        stopped: the request to stop that all ranks have received, as in ``Outcome.stopped``.
    """

    def __init__(self, config: Config, stop: StopRequest, say: Callable[[str], None]) -> None:
        self._config, self._stop, self._say = config, stop, say
        self._waits = config.local is not None
        self._waiting: tuple[float | None, int] = None, 0  # a loss and its step
        self.stopped: str | None = None

    def has(self, loss: float | None) -> bool:
        """Whether this rank has anything for a step, in which ``loss`` is its loss if that is not finite."""
        return loss is not None or (self._stop.reason is not None and not self._waits)

    def handle(self, loss: float | None, step: int) -> bool:
        """Answers a step for which some rank has anything; returns whether it is skipped. Collective, except with local SGD.

        Raises:
            NonFiniteLoss: ``on_nan`` is "stop"; on every rank.
        """
        if not self._waits:
            return self._answer(loss, step)
        self._waiting = self._waiting if loss is None else (loss, step)
        return True

    def handle_waiting(self) -> None:
        """Answers, at an entry of the log, what has waited for it, as :meth:`handle`. Collective."""
        if self._waits:
            waiting, self._waiting = self._waiting, (None, 0)
            self._answer(*waiting)

    def _answer(self, loss: float | None, step: int) -> bool:
        reports: list[tuple[str | None, float | None, str, int]] = of_all_processes(
            (self._stop.reason, loss, host_name(), step), "hvd_ckpt.train.reports"
        )
        # All ranks see the same reports in the same order, so they take the same one.
        self.stopped = next((stop for stop, *_ in reports if stop is not None), None)
        # Only the first stage and part are looked at, since all of a replica have the same loss.
        tensor = current().tensor
        reports = reports[: hvd.size() * tensor : tensor]
        faults = [
            (rank, loss, host, at) for rank, (_, loss, host, at) in enumerate(reports) if loss is not None
        ]
        if not faults:
            return False
        rank, loss, host, step = faults[0]
        others = f" (and on {len(faults) - 1} more of {len(reports)} ranks)" if len(faults) > 1 else ""
        fault = f"step {step}: the loss is {loss} on rank {rank}, host {host}{others}"
        if self._config.on_nan == "stop":
            raise NonFiniteLoss(f"{fault}: lower the learning rate, or give --on-nan skip")
        self._say(f"Warning: {fault}: the step is skipped.")
        return True

    def acknowledge(self) -> None:
        """Forgets a request: the run has stopped."""
        if self.stopped is not None:
            self._stop.acknowledge()
        self.stopped = None


# ------------------------------------------------------------------------------------ exit


@contextlib.contextmanager
def exit_handler() -> Iterator[None]:
    """Exits the process, with status 1, when its body raises; 130 for Ctrl-C. For the outermost call of a command.

    ``SystemExit`` and ``ConfigError``, which a command reports in its own way, pass.
    """
    try:
        yield
    except (SystemExit, ConfigError):
        raise
    except KeyboardInterrupt as error:
        exit_now(130, (str(error) or "interrupted") if current().number == 0 else "")
    # Everything else ends the process here. Python's own end would wait for Horovod, which waits for the other ranks.
    except BaseException as error:
        missing = explain_import_error(error) if isinstance(error, ImportError) else None
        if not missing and not isinstance(error, FATAL_ERRORS):
            uncaught.show(error)
            exit_now(1)
        # Of one pipeline stage, or of one group of local SGD, the first rank shows it.
        of_some = error.first if isinstance(error, WeightsDiffer) else None
        shows = current().number == 0 if of_some is None else of_some
        # Once a rank has exited, the launcher ends the others, so they leave the first rank time to show the error.
        if not shows:
            time.sleep(MOMENT)
        exit_now(2 if missing else 1, f"Error: {missing or error}" if missing or shows else "")


def exit_now(status: int, text: str = "") -> NoReturn:
    """Exits this process without the interpreter's own clean-up, after a text on stderr."""
    if text:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
