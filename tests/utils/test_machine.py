"""The machine: its name, its processes, and the memory that control groups leave of it."""

import os
import subprocess
import sys
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
UNLIMITED = str(2**63 - 4096)


@pytest.mark.parametrize(
    ("own", "place", "limit_file", "used_file", "prefix", "unlimited"),
    [
        (
            "5:cpu:/\n4:hugetlb,memory:/job/step",
            "memory/job",
            "limit_in_bytes",
            "usage_in_bytes",
            "total_",
            UNLIMITED,
        ),
        ("0::/job/step", "job", "max", "current", "", "max"),
        ("0::/seen/from/outside", "", "max", "current", "", "max"),
    ],
    ids=["1", "2", "2, in a container"],
)
def test_memory_is_that_of_the_container(
    own, place, limit_file, used_file, prefix, unlimited, tmp_path, monkeypatch
):
    """Of a process's own group and of the one around it, the smaller limit."""

    def group(folder, limit, cached):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{limit_file}").write_text(f"{limit}\n")
        (folder / f"memory.{used_file}").write_text(f"{300 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cached}\n")

    (tmp_path / "cgroup").write_text(own)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**50, available=2**49))
    limit = 2 * psutil.Process().memory_info().rss + 1000 * MIB
    group(tmp_path / "groups" / place, limit, 100 * MIB)
    group(tmp_path / "groups" / place / "step", unlimited, 0)
    assert machine.machine_memory()[0] == limit
    cpu = torch.device("cpu")
    assert free_memory(cpu) == limit - 200 * MIB
    with pretending(Grid(1, 4, 0, 0, local_size=2)):
        assert device_budget(1.0, cpu) == pytest.approx(500 * MIB, abs=50 * MIB)
    for name in ("OWN_GROUPS", "GROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / "missing")
    assert machine.machine_memory()[0] == 2**50


def test_processes_of_two_machines_of_one_name_are_told_apart(tmp_path, monkeypatch):
    own, listener = Peer.here(0), Listener()
    assert own.shares_table(Peer.here(1)) and listener.host == Listener().host
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")
    assert not own.shares_table(Peer.here(1)) and listener.host != Listener().host


def test_a_process_is_known_by_its_number_and_its_start():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        assert machine.process_status(process.pid, started) is not None
        assert machine.process_status(process.pid, started + 3) is not None  # the clock was adjusted
        assert machine.process_status(process.pid, started + 60) is None  # another process of the number
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # has ended, and is not waited for
        assert machine.process_status(process.pid, started) is None
    assert machine.process_status(process.pid, started) is None
