"""Tests of the watchdog and its search for silent hosts in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from forked import Case, Result, run_forked

from hvd_ckpt.processes import grid, hosts, parts, watchdog
from hvd_ckpt.processes.ancestry import has_broken, launcher_chain
from hvd_ckpt.processes.hosts import Peer
from hvd_ckpt.processes.launchers import RANK_VARIABLES
from hvd_ckpt.utils.text import ranks_text


@pytest.mark.parametrize("seconds", [0, -1, -0.5, math.nan, "10", True, [1]])
def test_a_limit_that_is_no_number_above_zero_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match="stall_timeout must be a number of seconds above zero"):
        watchdog.check_timeout(seconds)


IMPORTS = """
import os, sys, threading, time, torch
from horovod.torch import mpi_ops
import hvd_ckpt as hc
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.ancestry import end_with_parent
watchdog.TICK_SECONDS = 0.2
hc.init
"""
CASES = {
    "announced": """
watchdog.NOTICE_SECONDS = 0.3
hc.init()
watchdog.waiting("a test to end")(time.sleep)(1.5)
with watchdog.unlimited():
    watchdog.waiting("work")(time.sleep)(1)
watchdog.waiting("another one")(time.sleep)(1.5)
""",
    "several": """
poll, lost = mpi_ops.mpi_lib.horovod_torch_poll, []
mpi_ops.mpi_lib.horovod_torch_poll = lambda handle: poll(handle) if handle not in lost else 0
watchdog.NOTICE_SECONDS = 0.5
hc.init()
lost += [hc.allreduce_async(torch.ones(2), name=name) for name in "ab"]
end = time.monotonic() + 2
while time.monotonic() < end:
    [hc.poll(handle) for handle in lost]
    time.sleep(0.01)
""",
    "restarted": """
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
hc.init()
assert threading.active_count() == 2 and watchdog._dog.timeout is None
try:
    hc.init(stall_timeout=0)
except ValueError as error:
    assert "not 0" in str(error)
assert not end_with_parent()  # no launcher
assert threading.active_count() == 2
hc.init(stall_timeout=60)
for _ in range(2):
    hc.allreduce(torch.ones(2), name="x")
    watchdog.look_every_second(lambda: None)
    hc.shutdown()
    assert not watchdog._dog.looks
    hc.init()
handle = hc.allreduce_async(torch.ones(2), name="y")
while not hc.poll(handle):
    time.sleep(0.001)
hc.synchronize(handle)
assert not watchdog._dog.waits
assert [thread.name for thread in threading.enumerate()].count("hvd_ckpt watchdog") == 1
hc.init(stall_timeout=1)
print("waits", flush=True)
mpi_ops.mpi_lib.horovod_torch_wait_and_clear = None
watchdog.waiting("a test to end")(time.sleep)(60)
""",
    "unlimited": """
hc.init(stall_timeout=1)
with watchdog.waiting("a test to end"):  # which goes on behind the one within it
    with watchdog.unlimited():
        with watchdog.unlimited():
            watchdog.waiting("work")(time.sleep)(1.5)
        watchdog.waiting("more work")(time.sleep)(1.5)
    print("waits", flush=True)
    time.sleep(60)
""",
    "polled": """
poll, lost = mpi_ops.mpi_lib.horovod_torch_poll, []
mpi_ops.mpi_lib.horovod_torch_poll = lambda handle: poll(handle) if handle not in lost else 0
hc.init()
handle = hc.allreduce_async(torch.ones(2), name="polled")
lost.append(handle)
hc.init(stall_timeout=1)
print("waits", flush=True)
while not hc.poll(handle):
    time.sleep(0.01)
""",
    "ending": """
def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def diagnose(*ranks):
    raise OSError("no table")
hc.init(stall_timeout=1)
threading.Thread.start, sys.modules["hvd_ckpt.processes.hosts"].diagnose = start, diagnose
print("waits", flush=True)
watchdog.waiting("Horovod to end")(time.sleep)(60)
""",
}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return run_forked(IMPORTS, {name: Case(code) for name, code in CASES.items()})


@pytest.mark.parametrize(
    ("case", "announced"),
    [("announced", ["a test to end", "another one"]), ("several", ["a collective", "a collective"])],
)
def test_a_long_wait_without_a_limit_is_announced_once(
    results: dict[str, Result], case: str, announced: list[str]
) -> None:
    """Also of several handles that are polled."""
    said = results[case].stderr
    assert results[case].returncode == 0, said
    of = re.findall(
        r"still waiting, after \d+ s, for (.*) at <string>:\d+; hvd_ckpt.init\(stall_timeout", said
    )
    assert [one for one in of if "Horovod" not in one] == announced, said


@pytest.mark.parametrize(
    ("case", "awaited", "reason"),
    [
        ("restarted", "a test to end", "not all ranks have come"),
        ("unlimited", "a test to end", "not all ranks have come"),
        ("polled", "a collective", "not all ranks have come"),
        ("ending", "Horovod to end", r"the other ranks cannot be looked for \(no table\)"),
    ],
)
def test_a_wait_that_is_too_long_ends_the_process(
    results: dict[str, Result], case: str, awaited: str, reason: str
) -> None:
    """By one thread, that outlives a new start; also a wait that polls, and one at the end, where Python starts no more threads."""
    result = results[case]
    assert result.stdout == "waits\n", result.stderr
    assert result.returncode == 1
    assert re.search(rf"waited \d+ s for {awaited} at <string>:\d+; {reason}", result.stderr)


@contextlib.contextmanager
def started(command: list[str], typed: str = "", **environment: str) -> Iterator[tuple[int, int]]:
    """The process that was started, and one below it that says its id. Neither has a rank but for what is given."""
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    process: Any = subprocess.Popen(command, env={**clean, **environment}, text=True, **pipes)
    try:
        print(typed, file=process.stdin, flush=True)
        yield process.pid, int(process.stdout.readline())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


RANK = "sh -c 'echo $$; exec sleep 100'"


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_the_launcher_is_what_has_no_rank(name: str) -> None:
    with started(["sh", "-c", f"{RANK} & wait"], **{name: "0"}) as (wrapper, rank):
        assert [process.pid for process in launcher_chain(rank)] == [rank, wrapper, os.getpid()]
    with started(["sh", "-c", f"env {name}=0 {RANK} & wait"]) as (horovods_shell, rank):
        chain = launcher_chain(rank)
        assert [process.pid for process in chain] == [rank, horovods_shell, os.getpid()]
        assert not has_broken(chain)
        os.kill(horovods_shell, signal.SIGKILL)
        os.waitid(os.P_PID, horovods_shell, os.WEXITED | os.WNOWAIT)
        assert has_broken(chain)


def test_a_shell_in_which_a_rank_was_given_by_hand_may_go() -> None:
    with started(["sh"], typed=f"HOROVOD_RANK=0 {RANK} &") as (_, rank):
        assert launcher_chain(rank) == []


def test_what_hosts_and_ranks_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(Peer.here(0), addresses=("10.0.0.1", "172.17.0.1"))
    b = [Peer(rank, "b", ("10.0.0.2", "172.17.0.1"), 1, 1, "b") for rank in (1, 2)]
    c = [Peer(3, "c", ("10.0.0.3",), 1, 1, "c")]
    everyone = [own, *b, *c]
    asked: list[set[str]] = []

    def answering(addresses: Any) -> set[str]:
        asked.append(set(addresses))
        return up

    monkeypatch.setattr(hosts, "answering_addresses", answering)
    up = {"10.0.0.3", "172.17.0.1"}
    assert hosts.diagnose(everyone, own).startswith(
        "host b (10.0.0.2, 172.17.0.1; ranks 1-2) does not answer: it is down or cut off; see to it, then start again"
    )
    assert asked == [{"10.0.0.2", "10.0.0.3"}]  # not the address that this host has, too
    up = set()
    assert "do not answer: no other host does, so this one may be cut off" in hosts.diagnose(everyone, own)
    up = {"10.0.0.2", "10.0.0.3"}
    assert hosts.diagnose(everyone, own).startswith("all hosts answer, so a rank is stuck")
    gone = dataclasses.replace(own, rank=4, started=own.started - 60)
    assert hosts.diagnose([*everyone, gone], own).startswith(
        f"rank 4 (process {own.pid} on host {own.host}) has ended"
    )
    assert ranks_text([7, 0, 2, 1]) == "ranks 0-2, 7"


def test_refused_connections_count_as_answers_and_missing_machines_do_not() -> None:
    assert hosts.answering_addresses(["127.0.0.1", "255.255.255.255"]) == {"127.0.0.1"}


def test_a_rank_that_measures_as_another_one_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid.hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(grid, "_grid", grid.Grid(2, 2, 1, 1))
    with parts.alone(2):
        assert watchdog.who().startswith("rank 3 on host ")
