"""The lock of a run's folder: one run at a time writes there.

The folder has a file ``.lock`` with the host, the process and the time at which it was taken. Its owner touches the file every few
seconds. Of several processes one creates a file, also on network file systems; ``flock`` often works on one host alone there. A
lock whose owner has died is removed::

    of this machine     at once: no process has the owner's number and its time of start
    of another one      after a minute in which the file was not touched

This module does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil

from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.utils.machine import machine_name, process_status

LOCK_FILE = ".lock"
TOUCH_SECONDS = 10.0
DEAD_SECONDS = 60.0


class FolderLock:
    """The lock of a folder, held from construction on, until :meth:`release`, the end of this object or of the process.

    Where no file can be created, as on a file system that is read-only or full, nothing is locked.

    Raises:
        SnapshotError: another run has the folder; names its host, process and time.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._ended = threading.Event()
        self._lost = False
        self._release: Any = None
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._content = {"token": secrets.token_hex(8), "time": now, **_this_process()}
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._take(self._path)
            token = self._content["token"]
            self._release = weakref.finalize(self, _release, self._path, token, self._ended, os.getpid())
            arguments = weakref.ref(self), self._path, self._ended
            threading.Thread(target=_touch, args=arguments, name="folder lock", daemon=True).start()

    def check(self) -> None:
        """Raises SnapshotError if another run has taken the folder over, since this process had stood still for a minute."""
        if self._lost:
            raise SnapshotError(
                f"Another run has taken over '{self._path.parent}' while this process stood still; resume in another folder."
            )

    def release(self) -> None:
        """Removes the file."""
        if self._release is not None:
            self._release()

    def _take(self, path: Path) -> None:
        """Creates a file with this lock, if nobody who is alive has it.

        Only who holds the lock of a dead lock removes it: of several starters that have read the same dead lock, the slower
        ones would remove the lock of the first otherwise.
        """
        while not self._create(path):
            holder = _read(path)
            if holder is None:
                continue  # released meanwhile
            if not _is_dead(path, holder):
                if _read(path) == holder:
                    raise SnapshotError(self._in_use(holder))
                continue
            digest = hashlib.sha256(json.dumps(holder, sort_keys=True).encode()).hexdigest()[:16]
            removing = path.with_name(f"{path.name}-dead-{digest}")
            self._take(removing)
            try:
                if _read(path) == holder:
                    path.unlink()
            finally:
                removing.unlink(missing_ok=True)

    def _create(self, path: Path) -> bool:
        try:
            with open(path, "x") as file:
                file.write(json.dumps(self._content))
        except FileExistsError:
            return False
        except OSError:  # the disk is full
            path.unlink(missing_ok=True)
            raise
        return True

    def _in_use(self, holder: dict[str, Any]) -> str:
        process = f"process {holder.get('process')} on {holder.get('host')}"
        if all(holder.get(name) == self._content[name] for name in ("machine", "process", "started")):
            process = f"another object of this process ({holder.get('process')} on {holder.get('host')})"
        return (
            f"The folder '{self._path.parent}' is in use by {process}, since {holder.get('time')}: two runs would overwrite each "
            "other's snapshots; wait for its end, close() it, or give another folder."
        )


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a lock; None without one, and an empty one if the file cannot be understood."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _release(path: Path, token: str, ended: threading.Event, process: int) -> None:
    ended.set()
    with contextlib.suppress(OSError):
        if os.getpid() == process and (_read(path) or {}).get("token") == token:
            path.unlink()


def _touch(lock: weakref.ref[FolderLock], path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_SECONDS):
        held = lock()
        if held is None:
            return
        with contextlib.suppress(OSError):
            there, own = _read(path), held._content["token"]
            held._lost = there is not None and there.get("token", own) != own
            if there is not None and not held._lost:
                os.utime(path)
        del held


def _this_process() -> dict[str, Any]:
    """What tells this process from all others of its host: containers have numbers of their own."""
    host, process = socket.gethostname(), psutil.Process()
    machine = host
    with contextlib.suppress(OSError):
        machine = machine_name("pid")
    return {"host": host, "machine": machine, "process": process.pid, "started": process.create_time()}


def _is_dead(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the owner of a lock has ended."""
    if holder.get("machine") == _this_process()["machine"]:
        with contextlib.suppress(psutil.Error, KeyError, TypeError, ValueError):
            return process_status(holder["process"], holder["started"]) is None
    # Its clock may be another one: what counts is whether the file is touched. One that is empty may be about to be written.
    began, first = time.monotonic(), _touched(path)
    while time.monotonic() - began < DEAD_SECONDS:
        if _touched(path) != first or _read(path) != holder:
            return False
        time.sleep(0.5)
    return True


def _touched(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None
