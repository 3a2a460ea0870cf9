"""The lock of a run's folder: a second run is refused until the first has ended, however it does."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.lock import LOCK_FILE, FolderLock

OWNER = """
import os, sys, time
from pathlib import Path
from hvd_ckpt.snapshots.lock import FolderLock
held = FolderLock(Path(sys.argv[1]))
child = os.fork()  # as of a worker of a loader
if child:
    print(child, flush=True)
time.sleep(100)
"""


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            with pytest.raises(SnapshotError, match=f"process {owner.pid} on .*, since 20") as refused:
                FolderLock(tmp_path)
            assert "\n" not in str(refused.value)
            owner.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
            FolderLock(tmp_path).release()  # though its child runs on
        finally:
            owner.kill()
            os.kill(child, signal.SIGKILL)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"process": "x", "machine": 3}'])
def test_a_damaged_lock_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    held = FolderLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(SnapshotError, match="in use by another process"):
        FolderLock(tmp_path)
    del held


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user")
def test_a_run_of_another_user_is_refused_until_it_has_ended() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        held = FolderLock(folder)
        (folder / LOCK_FILE).chmod(0o644)
        os.seteuid(65534)
        try:
            with pytest.raises(SnapshotError, match=f"in use by process {os.getpid()} on"):
                FolderLock(folder)
            held.release()
            os.seteuid(0)
            (folder / LOCK_FILE).write_text("of a process that has died")
            os.seteuid(65534)
            own = FolderLock(folder)
            assert (folder / LOCK_FILE).stat().st_uid == 65534
            own.release()
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user")
def test_the_file_of_another_user_stays_where_files_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(38, os.strerror(38))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / LOCK_FILE).write_text("of a run that may go on")
        monkeypatch.setattr(fcntl, "flock", unknown)
        os.seteuid(65534)
        try:
            FolderLock(folder).release()
        finally:
            os.seteuid(0)
        assert (folder / LOCK_FILE).read_text() == "of a run that may go on"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "mine")
    held = FolderLock(tmp_path)
    held.check()
    held.release()
    assert (tmp_path / "mine").read_text() == "text" and (tmp_path / LOCK_FILE).is_symlink()


def test_of_starters_at_once_one_has_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        (tmp_path / LOCK_FILE).write_text("{}")  # of a process that was killed
        results, begun = context.Queue(), context.Barrier(6)
        starters = [context.Process(target=_start, args=(tmp_path, begun, results)) for _ in range(6)]
        for starter in starters:
            starter.start()
        assert sorted(results.get(timeout=60) for _ in starters) == [False] * 5 + [True]
        for starter in starters:
            starter.kill()
            starter.join()


def _start(folder: Path, begun: Any, results: Any) -> None:
    begun.wait()
    try:
        held = FolderLock(folder)
    except SnapshotError:
        results.put(False)
    else:
        results.put(True)
        time.sleep(100)
        del held


def test_a_lock_that_was_removed_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, list[Path]()

    def late(file: Any, how: int) -> None:
        if not removed:
            removed.append(tmp_path / LOCK_FILE)
            removed[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    held = FolderLock(tmp_path)
    with pytest.raises(SnapshotError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path)
    held.check()
    held.release()
    assert not os.listdir(tmp_path)


def test_a_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=held.release)
    child.start()
    child.join()
    with pytest.raises(SnapshotError, match="in use"):
        FolderLock(tmp_path)
    del held
    gc.collect()
    assert not os.listdir(tmp_path)


def test_where_files_cannot_be_locked_the_first_owner_hears_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", unknown)
    first = FolderLock(tmp_path)
    first.check()
    second = FolderLock(tmp_path)
    second.check()
    with pytest.raises(SnapshotError, match=f"process {os.getpid()} on .*taken over"):
        first.check()
    first.release()
    assert json.loads((tmp_path / LOCK_FILE).read_text())  # it is the other's
    second.release()
    assert not os.listdir(tmp_path)
