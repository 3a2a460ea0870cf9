"""Runs every test: what `bash main.sh test` calls.

tests/single and tests/launch run under plain pytest; tests/parallel runs under horovodrun, with 1, 2 and 4 ranks, over
each controller that works here. Each rank leaves a JUnit file. A test of tests/parallel failed if it failed on any rank,
and a run that crashed, hung or collected nothing counts as one failure. The last line sums all runs.

Arguments go to pytest. Those that name files or folders choose the tests, and runs without any of them are left out:

    python tests/run.py -x tests/parallel/test_runtime.py -k threads
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
ORDER = {"passed": 0, "skipped": 1, "failed": 2}
NO_TESTS = 5  # pytest's exit status when its arguments deselect everything


@dataclass(frozen=True)
class Run:
    """One pytest run: a folder of tests, how many ranks, over what, and for how many seconds at most."""

    folder: str
    ranks: int = 1
    controller: str = ""
    timeout: float = 900.0

    @property
    def title(self) -> str:
        return (
            f"{self.folder} on {self.ranks} ranks over {self.controller}" if self.controller else self.folder
        )

    def command(self, results: Path, arguments: list[str]) -> list[str]:
        worker = [sys.executable, str(Path(__file__).resolve()), "--worker", str(results), *arguments]
        if not self.controller:
            return worker
        launcher = str(Path(sys.executable).parent / "horovodrun")
        return [launcher, "-np", str(self.ranks), f"--{self.controller}", *worker, "--color=no"]


RUNS = (
    Run("tests/single"),
    Run("tests/parallel", 1, "gloo"),
    *(Run("tests/parallel", ranks, controller) for controller in ("gloo", "mpi") for ranks in (2, 4)),
    Run("tests/launch"),
)


@functools.cache
def mpi_works() -> bool:
    """Whether ranks can be started over MPI here; where they cannot, this says so once."""
    from hvd_ckpt.probe import probe

    answer = probe("mpi")
    if not answer.works:
        print(f"\nMPI does not work here ({answer.reason}): its runs are left out.", flush=True)
    return answer.works


def split_arguments(arguments: list[str]) -> tuple[list[str], list[Path]]:
    """Pytest's options, and the tests that are named: paths that exist, with or without ``::name``."""
    options, chosen = [], []
    for argument in arguments:
        path = Path(argument.split("::")[0])
        if not argument.startswith("-") and (path.exists() or (ROOT / path).exists()):
            chosen.append(Path(os.path.abspath(argument if path.exists() else ROOT / argument)))
        else:
            options.append(argument)
    return options, chosen


def select(run: Run, chosen: list[Path]) -> list[str]:
    """The paths to hand to this run's pytest: those chosen in its folder, its folder if it or all was chosen."""
    folder = ROOT / run.folder
    inside = [str(path) for path in chosen if path != folder and folder in path.parents]
    whole = not chosen or any(path == folder or path in folder.parents for path in chosen)
    return [str(folder)] if whole else inside


def execute(run: Run, paths: list[str], options: list[str]) -> Counter[str]:
    """Run it with its output passing through; the outcomes, one for each test."""
    print(f"\n===== {run.title} =====", flush=True)
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_tests_") as folder:
        results = Path(folder)
        status = _call(run.command(results, [*paths, *options]), run.timeout)
        answers = [_read(results / f"{rank}.xml") for rank in range(run.ranks)]
    counts = Counter(_merge([answer for answer in answers if answer is not None]).values())
    if status is None:
        print(f"error: {run.title} did not end within {run.timeout:g} seconds and was stopped.", flush=True)
        counts["failed"] += 1
    elif (None in answers or status != 0) and not counts["failed"]:
        print(f"error: {run.title} ended with exit status {status} before it could report.", flush=True)
        counts["failed"] += 1
    return counts


def _call(command: list[str], timeout: float) -> int | None:
    """The exit status of a command, or None if it ran past the limit and was ended with all it started."""
    # Without it a rank that waits in MPI takes the core from one that works, where there are more ranks than cores.
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", **os.environ}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher that is asked to end also ends its ranks, which are in other sessions
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        return None
    except KeyboardInterrupt:
        process.terminate()
        process.wait(10)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(path: Path) -> dict[str, str] | None:
    """The outcome of each test in one rank's JUnit file; None if that rank did not get to write it."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    outcomes: dict[str, str] = {}
    for number, case in enumerate(cases):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        name = f"{case.get('classname')}::{case.get('name')}" if case.get("name") else str(number)
        outcomes[name] = max(outcome, outcomes.get(name, "passed"), key=ORDER.__getitem__)
    return outcomes


def _merge(ranks: list[dict[str, str]]) -> dict[str, str]:
    """Each test's worst outcome over the ranks, except that a test skipped on some ranks only has passed."""
    merged: dict[str, str] = {}
    for name in {name for rank in ranks for name in rank}:
        seen = {rank[name] for rank in ranks if name in rank}
        merged[name] = "failed" if "failed" in seen else "passed" if "passed" in seen else "skipped"
    return merged


def work(results: str, arguments: list[str]) -> int:
    """One process of a run: pytest, its outcomes written where :func:`execute` looks for them."""
    import pytest

    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    status = int(pytest.main([f"--junitxml={results}/{rank}.xml", *arguments]))
    return 0 if status == NO_TESTS else status  # a launcher would take any other status for a crash


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--worker"]:
        return work(arguments[1], arguments[2:])
    start = time.monotonic()
    options, chosen = split_arguments(arguments)
    total: Counter[str] = Counter()
    lines = []
    for run in RUNS:
        paths = select(run, chosen)
        if not paths or not any((ROOT / run.folder).rglob("test_*.py")):
            continue
        if run.controller == "mpi" and not mpi_works():
            continue
        began = time.monotonic()
        counts = execute(run, paths, options)
        total += counts
        figures = ", ".join(f"{counts[name]} {name}" for name in ORDER)
        lines.append(f"  {run.title}: {figures} in {time.monotonic() - began:.0f} s")
    print(f"\n===== all runs, {time.monotonic() - start:.0f} s =====")
    print("\n".join(lines))
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] or not sum(total.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
