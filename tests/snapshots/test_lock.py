"""The lock of a run's folder: a second run is refused, and a lock whose owner has died is taken over."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_ckpt.snapshots import lock
from hvd_ckpt.snapshots.folder import SnapshotError
from hvd_ckpt.snapshots.lock import LOCK_FILE, FolderLock

OWNER = """
import sys, time
from pathlib import Path
from hvd_ckpt.snapshots.lock import FolderLock
held = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Any:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def rewrite(folder: Path, **changed: Any) -> None:
    content = json.loads((folder / LOCK_FILE).read_text())
    (folder / LOCK_FILE).write_text(json.dumps({**content, **changed}))


def test_a_second_process_is_refused_until_the_first_has_died(owner: Any, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=f"process {owner.pid} on .*, since 20") as refused:
        FolderLock(tmp_path)
    assert "\n" not in str(refused.value)
    owner.send_signal(signal.SIGKILL)
    while psutil.Process(owner.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    FolderLock(tmp_path).release()
    assert not os.listdir(tmp_path)


def test_another_process_with_the_owners_number_is_not_the_owner(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    rewrite(tmp_path, started=1.0, token="0")
    other = FolderLock(tmp_path)
    held.release()
    with pytest.raises(SnapshotError, match="another object of this process"):
        FolderLock(tmp_path)
    other.release()
    assert not os.listdir(tmp_path)


def test_an_owner_on_another_machine_is_alive_while_it_touches_its_lock(
    owner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "DEAD_SECONDS", 2.0)
    rewrite(tmp_path, machine="other", host="other")
    toucher = multiprocessing.get_context("fork").Process(target=_touch, args=(tmp_path / LOCK_FILE,))
    toucher.start()
    with pytest.raises(SnapshotError, match="on other"):
        FolderLock(tmp_path)
    toucher.kill()
    toucher.join()
    FolderLock(tmp_path).release()


def _touch(path: Path) -> None:
    while True:
        time.sleep(0.2)
        os.utime(path)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"process": "x", "machine": 3}'])
def test_a_damaged_lock_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(lock, "DEAD_SECONDS", 0.1)
    (tmp_path / LOCK_FILE).write_text(content)
    FolderLock(tmp_path).release()


def test_of_starters_at_once_one_takes_a_dead_lock_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        dead = FolderLock(tmp_path)
        rewrite(tmp_path, started=1.0, token="0")
        results, judged = context.Queue(), context.Barrier(6)
        starters = [
            context.Process(target=_start, args=(tmp_path, judged, results)) for _ in range(6)
        ]  # fmt: skip
        for starter in starters:
            starter.start()
        assert sorted(results.get(timeout=60) for _ in starters) == [False] * 5 + [True]
        for starter in starters:
            starter.kill()
            starter.join()
        dead.release()


def test_a_lock_that_is_read_before_it_is_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = FolderLock(tmp_path)
    early: list[dict[str, Any]] = [{}]  # what the first read finds
    read = lock._read
    monkeypatch.setattr(lock, "_read", lambda path: early.pop() if early else read(path))
    monkeypatch.setattr(
        lock.time, "sleep", lambda seconds: pytest.fail("it waits for a lock of this machine")
    )
    with pytest.raises(SnapshotError, match="in use by another object of this process"):
        FolderLock(tmp_path)
    held.release()


def _start(folder: Path, judged: Any, results: Any) -> None:
    """Takes the lock of a folder once all starters have found that the lock there is dead."""
    is_dead, first = lock._is_dead, [True]

    def dead_for_all(path: Path, holder: dict[str, Any]) -> bool:
        dead = is_dead(path, holder)
        if first:
            first.clear()
            judged.wait()
        return dead

    lock._is_dead = dead_for_all
    try:
        held = FolderLock(folder)
    except SnapshotError:
        results.put(False)
    else:
        results.put(True)
        time.sleep(100)
        held.release()


def test_a_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    held = FolderLock(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=held.release)
    child.start()
    child.join()
    assert (tmp_path / LOCK_FILE).exists()
    del held
    gc.collect()
    assert not os.listdir(tmp_path)


def test_an_owner_that_stood_still_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.05)
    held = FolderLock(tmp_path)
    held.check()
    rewrite(tmp_path, token="0")
    time.sleep(0.5)
    with pytest.raises(SnapshotError, match="taken over"):
        held.check()
    held.release()
    assert (tmp_path / LOCK_FILE).exists()  # it is the other's
