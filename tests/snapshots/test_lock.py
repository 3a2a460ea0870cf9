"""The lock of a run's folder: a second run is refused until the first has ended, however it does."""

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

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
by_root = pytest.mark.skipif(os.getuid() != 0, reason="root alone can become another user")


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that has none."""

    def unknown(*_):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", unknown)


@pytest.fixture
def everyones_folder():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@contextmanager
def another_user():
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path):
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
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
def test_a_damaged_lock_is_taken_over(tmp_path, content):
    (tmp_path / LOCK_FILE).write_text(content)
    held = FolderLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(SnapshotError, match="in use by another process"):
        FolderLock(tmp_path)
    del held


@by_root
def test_a_run_of_another_user_is_refused_until_it_has_ended(everyones_folder):
    file = everyones_folder / LOCK_FILE
    held = FolderLock(everyones_folder)
    file.chmod(0o644)
    with another_user():
        with pytest.raises(SnapshotError, match=f"in use by process {os.getpid()} on"):
            FolderLock(everyones_folder)
        held.release()
    file.write_text("of a process that has died")
    with another_user():
        own = FolderLock(everyones_folder)
        assert file.stat().st_uid == 65534
        own.release()


@by_root
@pytest.mark.usefixtures("without_locks")
def test_the_file_of_another_user_stays_where_files_cannot_be_locked(everyones_folder):
    (everyones_folder / LOCK_FILE).write_text("of a run that may go on")
    with another_user():
        FolderLock(everyones_folder).release()
    assert (everyones_folder / LOCK_FILE).read_text() == "of a run that may go on"


@pytest.mark.usefixtures("without_locks")
def test_where_files_cannot_be_locked_the_first_owner_hears_of_the_second(tmp_path):
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


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("text")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "mine")
    held = FolderLock(tmp_path)
    held.check()
    held.release()
    assert (tmp_path / "mine").read_text() == "text" and (tmp_path / LOCK_FILE).is_symlink()


def test_a_lock_that_was_removed_meanwhile_is_made_anew(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def late(file, how):
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


def test_a_child_leaves_the_lock_to_its_parent(tmp_path):
    held = FolderLock(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=held.release)
    child.start()
    child.join()
    with pytest.raises(SnapshotError, match="in use"):
        FolderLock(tmp_path)
    del held
    gc.collect()
    assert not os.listdir(tmp_path)
