"""The machine: its name and its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hvd_ckpt.processes.hosts import Peer
from hvd_ckpt.processes.near import Listener
from hvd_ckpt.snapshots.lock import FolderLock
from hvd_ckpt.utils import machine


@pytest.fixture
def rebooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, this is another machine of the same name."""
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")


def test_processes_of_two_machines_of_one_name_are_told_apart(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "run"
    own, listener, lock = Peer.here(0), Listener(), FolderLock(folder)
    assert own.shares_table(Peer.here(1)) and listener.host == Listener().host
    before = (folder / ".lock").read_text()
    lock.release()
    request.getfixturevalue("rebooted")
    assert not own.shares_table(Peer.here(1)) and listener.host != Listener().host
    again = FolderLock(folder)
    assert machine.machine_name("pid") in (folder / ".lock").read_text()
    assert machine.machine_name("pid") not in before
    again.release()


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        assert machine.process_status(process.pid, started) is not None
        assert machine.process_status(process.pid, started + 3) is not None  # the clock was adjusted
        assert machine.process_status(process.pid, started + 60) is None  # another process of the number
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # has ended, and is not waited for
        assert machine.process_status(process.pid, started) is None
    assert machine.process_status(process.pid, started) is None
