"""Jobs of Horovod Elastic over several hosts: workers that are killed, and hosts that join. The bits of such a run: tests/faults.

The hosts are network namespaces (see hosts.py). Each job begins on hosts a and b. A worker on b is killed, and Horovod drops that
host; then the discovery script lists c as well.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosts as namespaces
import pytest
from hosts import Hosts
from snapshot_files import read_snapshot

from hvd_ckpt.app.training import logs

pytestmark = [
    pytest.mark.launch,
    pytest.mark.hosts,
    pytest.mark.skipif(namespaces.unavailable() is not None, reason=str(namespaces.unavailable())),
]

LOOP = Path(__file__).resolve().parents[1] / "helpers" / "scripts" / "elastic_loop.py"
SECONDS = 240  # that a phase may take on a busy machine
COMMIT_EVERY = 5
BATCH, LR = 4, 3e-4
SETTINGS = ["--model", "bert-tiny", "--model-option", "width=32", "--model-option", "layers=1"]
SETTINGS += f"--model-option heads=2 --sequence-length 16 --batch {BATCH} --steps 100000".split()
SETTINGS += ["--snapshot-every", str(COMMIT_EVERY), "--keep-snapshots", "100000", "--log-every", "1"]
SETTINGS += ["--seed", "3", "--schedule", "constant", "--lr", str(LR), "--commit-every", str(COMMIT_EVERY)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def nothing_left(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.clear()


class Job:
    """A program in an elastic job with a worker on host a and one on b, and later on others."""

    def __init__(self, hosts: Hosts, folder: Path, program: list[str]) -> None:
        self._hosts = hosts
        self._listed, self._output = folder / "listed", folder / "output"
        self.discover("a", "b")
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {shlex.quote(str(self._listed))}\n")
        script.chmod(0o755)
        command = ["horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
        command += ["--host-discovery-script", str(script), "--network-interfaces", "eth0", *program]
        line = f"exec {shlex.join(command)} >{shlex.quote(str(self._output))} 2>&1"
        self._process = hosts.start("a", ["bash", "-c", line], environment={"OMP_NUM_THREADS": "1"})

    @property
    def output(self) -> str:
        """Without the lines of single steps."""
        lines = self._output.read_text().splitlines() if self._output.exists() else []
        return "\n".join(line for line in lines if "  loss " not in line)

    def discover(self, *found: str) -> None:
        """Hosts that the discovery script lists from now on."""
        new = self._listed.with_suffix(".new")
        new.write_text("".join(f"{host}:1\n" for host in found))
        new.rename(self._listed)

    def kill(self, host: str) -> None:
        """Kills the worker on a host, which is not the launcher's."""
        running = [one for one, line in self._hosts.processes(host).items() if "python" in line.split()[0]]
        assert running, self.output
        for worker in running:
            os.kill(worker, signal.SIGKILL)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Waits for something that is true, and returns it."""
        end = time.monotonic() + SECONDS
        while not (found := condition()):
            assert self._process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.05)
        return found

    def end(self) -> int:
        try:
            return self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(self.output)


def test_training_resumes_from_the_last_commit(hosts, tmp_path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(bytes(range(32, 127)) * 40)
    command = ["hvd-ckpt", "train", *SETTINGS, "--data", f"text:{text}", "--output", str(run)]
    job = Job(hosts, tmp_path, command)
    job.wait_for(lambda: len(steps_of(run)) > 2 * COMMIT_EVERY)
    job.wait_for(lambda: snapshot_of(run, len(steps_of(run)) // COMMIT_EVERY * COMMIT_EVERY).exists())
    job.kill("b")
    alone = job.wait_for(lambda: starts(job.output, 1))
    job.discover("a", "b", "c")
    joined = job.wait_for(lambda: starts(job.output, 2))
    job.wait_for(lambda: steps_of(run)[-1] > joined + COMMIT_EVERY)
    (run / "stop").touch()
    assert job.end() == 0, job.output

    # Each step once, and the rate of the ranks that took it.
    records = [one for one in logs.read(run / "log.jsonl") if one["kind"] == "train"]
    last = len(records)
    assert [one["step"] for one in records] == list(range(1, last + 1))
    assert alone % COMMIT_EVERY == joined % COMMIT_EVERY == 0
    halves = [one["lr"] == LR / 2 for one in records]
    assert halves == [alone <= step < joined for step in range(last)]
    # No sample twice, and none left out. The snapshot of the step after which the rank was lost may not have been written.
    written = {int(one.name.removeprefix("step-")) for one in (run / "snapshots").iterdir()}
    for step in written | {joined, last}:
        of_one_rank = sum(alone <= one < joined for one in range(step))
        progress = read_snapshot(snapshot_of(run, step), 0).replicated["progress"]
        assert progress["position"] == 2 * BATCH * step - BATCH * of_one_rank


def test_a_loop_of_ones_own_loses_a_rank_and_gets_another(hosts, tmp_path) -> None:
    told = tmp_path / "told.jsonl"
    job = Job(hosts, tmp_path, [sys.executable, str(LOOP), str(told), str(tmp_path / "stop")])
    job.wait_for(lambda: count(told, "commit", 2) > 2)
    job.kill("b")
    job.wait_for(lambda: count(told, "commit", 1) > 2)
    job.discover("a", "b", "c")
    before = count(told, "commit", 2)
    job.wait_for(lambda: count(told, "commit", 2) > before + 2)
    (tmp_path / "stop").touch()
    assert job.end() == 0, job.output
    records = told_in(told)
    assert all(one["equal"] for one in records)
    assert [one["ranks"] for one in records if one["what"] in ("start", "end")] == [2, 1, 2, 2]
    for earlier, one in itertools.pairwise(records):
        steps = {"commit": [COMMIT_EVERY], "end": [0]}
        killed_in_its_commit = [0, -COMMIT_EVERY]
        assert one["step"] - earlier["step"] in steps.get(one["what"], killed_in_its_commit)


def steps_of(run: Path) -> list[int]:
    path = run / "log.jsonl"
    return [one["step"] for one in logs.read(path) if one["kind"] == "train"] if path.exists() else []


def starts(output: str, ranks: int) -> int | None:
    """After which step training went on on so many ranks."""
    lines = [line.split() for line in output.splitlines() if f"on {ranks} ranks" in line]
    return int(lines[-1][lines[-1].index("step") + 1]) if lines else None


def snapshot_of(run: Path, step: int) -> Path:
    return run / "snapshots" / f"step-{step:08}"


def told_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(path: Path, what: str, ranks: int) -> int:
    return sum(one["what"] == what and one["ranks"] == ranks for one in told_in(path))
