"""The lock of a run's folder: one run at a time writes there.

The owner has locked the file ``.lock`` in the folder by ``flock``, and written its host, its process and the time into it. The
system gives the lock up when the process ends, however that is. On a file system whose locks hold on one host alone, or that has
none, a second run overwrites the file, and the first hears of it in its next snapshot.

This module does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hvd_ckpt.snapshots.folder import SnapshotError

LOCK_FILE = ".lock"


class FolderLock:
    """The lock of a folder, held from construction on, until :meth:`release`, the end of this object or of the process.

    Where no file can be written, as on a file system that is read-only or full, nothing is locked.

    Raises:
        SnapshotError: another run has the folder; names its host, process and time.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._content = folder / LOCK_FILE, ""
        self._release: Callable[[], Any] = lambda: None
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        owner = {"host": socket.gethostname(), "process": os.getpid(), "time": now}
        content = json.dumps({**owner, "token": secrets.token_hex(8)})
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = self._locked()
            _held.add(file)
            self._release = weakref.finalize(self, _release, file, self._path, content)
            file.truncate(0)
            file.write(content)
            file.flush()
            self._content = content

    def check(self) -> None:
        """Raises SnapshotError if another run has taken the folder over."""
        there = _read(self._path)
        if self._content and there not in (None, self._content):
            raise SnapshotError(
                f"Another run, {_owner(there)}, has taken over '{self._path.parent}': resume in another folder."
            )

    def release(self) -> None:
        """Removes the file."""
        self._release()

    def _locked(self) -> TextIOWrapper:
        """The file, open and locked."""
        while True:
            with contextlib.ExitStack() as opened:
                try:
                    file = opened.enter_context(open(self._path, "a+", opener=_open))
                except PermissionError:  # of another user, which can be locked as well
                    file = opened.enter_context(open(self._path, opener=_open))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise SnapshotError(
                        f"The folder '{self._path.parent}' is in use by {_owner(_read(self._path))}: two runs would overwrite each "
                        "other's snapshots; wait for its end, close() it, or give another folder."
                    ) from None
                except OSError:
                    # A file system without locks, where nobody knows whether another user's run goes on.
                    if not file.writable():
                        raise
                with contextlib.suppress(FileNotFoundError):  # of an owner that has removed it meanwhile
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        if file.writable():
                            opened.pop_all()
                            return file
                        self._path.unlink()  # of another user's run, which has ended


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # what is found there is overwritten


def _read(path: Path) -> str | None:
    """The content of a lock; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text()
    return None


def _owner(content: str | None) -> str:
    """The owner of a lock in words."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        owner = json.loads(content or "")
        return f"process {owner['process']} on {owner['host']}, since {owner['time']}"
    return "another process"


def _release(file: TextIOWrapper, path: Path, content: str) -> None:
    if not file.closed:
        with contextlib.suppress(OSError), file:
            if _read(path) == content:
                path.unlink()


_held: weakref.WeakSet[TextIOWrapper] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, such as a worker of a loader, would hold the lock of a parent that has died."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
