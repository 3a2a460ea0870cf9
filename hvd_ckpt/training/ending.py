"""How a command on many ranks ends when something goes wrong: all ranks at once, and one of them says why.

The rank where it happened shows its traceback. The others find that it has gone (Horovod's collectives fail), or are told by it
what went wrong; each says so in one line. Nobody waits: a process that has failed leaves without Horovod's orderly shutdown,
in which it would wait for ranks that compute, and the launcher ends whoever is left.
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

from hvd_ckpt import watchdog
from hvd_ckpt.hosts import host_name
from hvd_ckpt.install.extras import explain_import_error
from hvd_ckpt.reduction.agreement import FailedElsewhere
from hvd_ckpt.reduction.consistency import WeightsDiffer
from hvd_ckpt.snapshots.reader import SnapshotError
from hvd_ckpt.snapshots.writer import EXIT_SECONDS
from hvd_ckpt.training.config import ConfigError
from hvd_ckpt.training.guards import CannotGoOn
from hvd_ckpt.training.stopping import FAILURE_FILE, SUPERVISED_VARIABLE

__all__ = ["leave", "one_ending"]

MOMENT = EXIT_SECONDS + 2  # in which rank 0 has closed its files
SAID_ONCE = (CannotGoOn, WeightsDiffer, SnapshotError)  # by all ranks alike


@contextlib.contextmanager
def one_ending(folder: Path | None = None) -> Iterator[None]:
    """Ends the process, with status 1, when its body raises; 130 for Ctrl-C. For the outermost call of a command.

    ``SystemExit`` and ``ConfigError``, which a command says in its own way, pass.

    Args:
        folder: of the run. Where a supervisor has started the ranks, an error that would come again is left there for it, as
            ``failure.txt``.
    """
    try:
        yield
    except SystemExit:
        raise
    except ConfigError as error:
        if not error.passing:
            _leave_word(folder, error)
        raise
    except KeyboardInterrupt:
        leave(130)
    except SAID_ONCE as error:
        if _rank() != 0:  # once a rank has left, the launcher lets the others no time
            time.sleep(MOMENT)
        elif not isinstance(error, SnapshotError):
            _leave_word(folder, error)
        if _rank() == 0:
            _say(f"Error: {error}")
        leave(1)
    except FailedElsewhere as error:
        _say(f"{_who()}: ended with the others: {error}")
        leave(1)
    except hvd.HorovodInternalError:
        lost = watchdog.lost_hosts()
        _say(f"{_who()}: ended, because another rank has gone{': ' if lost else ''}{lost}")
        leave(1)
    except BaseException as error:
        missing = explain_import_error(error) if isinstance(error, ImportError) else None
        if missing:
            if _rank() != 0:  # as above
                time.sleep(MOMENT)
            _say(f"Error: {missing}" if _rank() == 0 else f"{_who()}: {missing}")
            leave(2)
        _say(f"{_who()}: ended by this error:\n{traceback.format_exc().rstrip()}")
        leave(1)


def _leave_word(folder: Path | None, error: Exception) -> None:
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


def leave(status: int) -> NoReturn:
    """Ends this process now, without what the interpreter does at its end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
