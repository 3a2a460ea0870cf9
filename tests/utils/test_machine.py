"""The machine: its name, its processes, and the memory that control groups leave of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hvd_ckpt.planning.budget import device_budget
from hvd_ckpt.processes.grid import Grid, pretending
from hvd_ckpt.processes.hosts import Peer
from hvd_ckpt.processes.near import Listener
from hvd_ckpt.utils import machine
from hvd_ckpt.utils.memory import free_memory

MIB = 2**20
VERSIONS = {  # what a process sees of its own group and of the one around it
    "1": ("5:cpu:/\n4:hugetlb,memory:/job/step", "memory/job", "limit_in_bytes", "usage_in_bytes", "total_"),
    "2": ("0::/job/step", "job", "max", "current", ""),
    "2, in a container": ("0::/seen/from/outside", "", "max", "current", ""),
}


@pytest.fixture
def rebooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, this is another machine of the same name."""
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")


def group(folder: Path, limit: str, used: int, cached: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {cached}\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_is_that_of_the_container(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, place, *names = VERSIONS[version]
    (tmp_path / "cgroup").write_text(own)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**50, available=2**49))
    held = psutil.Process().memory_info().rss
    limit = 2 * held + 1000 * MIB
    job = tmp_path / "groups" / place
    group(job, str(limit), 300 * MIB, 100 * MIB, (names[0], names[1], names[2]))
    unlimited = "max" if names[0] == "max" else str(2**63 - 4096)
    group(job / "step", unlimited, 300 * MIB, 0, (names[0], names[1], names[2]))
    assert machine.machine_memory()[0] == limit
    cpu = torch.device("cpu")
    assert free_memory(cpu) == limit - 200 * MIB
    with pretending(Grid(1, 4, 0, 0, local_size=2)):
        assert device_budget(1.0, cpu) == pytest.approx(500 * MIB, abs=50 * MIB)


def test_memory_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OWN_GROUPS", "GROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / "missing")
    assert machine.machine_memory()[0] == psutil.virtual_memory().total


def test_processes_of_two_machines_of_one_name_are_told_apart(request: pytest.FixtureRequest) -> None:
    own, listener = Peer.here(0), Listener()
    assert own.shares_table(Peer.here(1)) and listener.host == Listener().host
    request.getfixturevalue("rebooted")
    assert not own.shares_table(Peer.here(1)) and listener.host != Listener().host


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
