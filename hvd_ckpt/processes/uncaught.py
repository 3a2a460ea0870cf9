"""Uncaught errors on ranks: one traceback per error and host, and one line from each other rank.

:func:`hvd_ckpt.init` replaces Python's own ``sys.excepthook``, but never that of a user. An error is one line if another
rank of this host already shows it, or if it only reports the end of another rank. A Ctrl-C that names the operation that it
interrupted is one line, too. Every other error is shown in full.
Ranks need not wait for each other. The first rank binds a socket whose name is made of the job and the text of the traceback,
and others cannot bind it as long as that rank lives. Exit status and exit handlers are Python's own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import sys
import textwrap
import time
import traceback
from types import TracebackType

import horovod.torch as hvd

from hvd_ckpt.processes import watchdog

JOB_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE")
HOLD_SECONDS = 1.0  # in which the other ranks come to the same error
# Horovod's and Gloo's words for a rank that has ended; other errors of theirs are the script's own.
GONE = ("has been shut down", "closed by peer", "reset by peer", "Broken pipe", "Timed out waiting")
_held: list[socket.socket] = []


def says_what_it_interrupted(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and bool(error.args)  # Python's own has no text


def show(error: BaseException) -> None:
    """Shows an error that ends this process: its traceback, or one line where another rank or the error itself explains it."""
    line = f"{watchdog.who()}: {error}" if says_what_it_interrupted(error) else ""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # a doubt is resolved by showing everything
            line = _line_for(error, error.__traceback__)
    shown = (
        line
        or f"{watchdog.who()}: ended by this error:\n{''.join(traceback.format_exception(error)).rstrip()}"
    )
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{shown}\n")  # at once: a launcher would mix its parts with other ranks' lines
        sys.stderr.flush()
    if not line and _held:
        time.sleep(HOLD_SECONDS)


def _line_for(error: Exception, trace: TracebackType | None) -> str:
    """The line that stands for an error that another rank explains; empty if this rank has to."""
    text = " ".join(str(error).split())
    if getattr(error, "raised_elsewhere", False):
        return f"{watchdog.who()}: ended with the others: {text}"
    if isinstance(error, hvd.HorovodInternalError) and any(word in text for word in GONE):
        lost = watchdog.lost_hosts()
        reason = lost or ("" if "has been shut down" in text else text)
        awaited = watchdog.waited_for(reversed(list(traceback.walk_tb(trace))), watchdog.awaited_by(error))
        return f"{watchdog.who()}: ended, waiting for {awaited}, because another rank has ended or gone{reason and ': '}{reason}"
    if not _is_first("".join(traceback.format_exception(error))):
        return f"{watchdog.who()}: ended by the same error: {type(error).__name__}: {textwrap.shorten(text, 160)}"
    return ""


def _is_first(shown: str) -> bool:
    """Whether no other rank of this job on this host is showing this traceback; True if that cannot be known."""
    job = [os.environ.get(name, "") for name in JOB_VARIABLES]
    if not any(job):
        return True
    shown = re.sub(r"\b0x[0-9a-fA-F]+", "0x", shown)  # addresses of objects
    digest = hashlib.sha256("\n".join([str(os.getuid()), *job, shown]).encode(errors="replace")).hexdigest()
    # The kernel lets one process bind a name. This needs no message between ranks, and no file that a killed rank would leave.
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0hvd_ckpt.{digest}")  # a name of Linux's that is not a file, and ends with the process
    except OSError as error:
        mark.close()
        return error.errno != errno.EADDRINUSE
    _held.append(mark)
    return True
