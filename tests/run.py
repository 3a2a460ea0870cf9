"""Runs every test: what `bash main.sh test` calls.

tests/single, tests/fuzz and tests/launch run under plain pytest; tests/parallel runs under horovodrun, with 1, 2, 3 and 4
ranks, over each controller that works here (its conftest.py says what runs where). Each rank leaves a JUnit file. A test of
tests/parallel failed if it failed on any rank, and a run that crashed, hung or collected nothing counts as one failure. The
last line sums all runs.

Whole commands keep one core busy, most of the time. So tests/launch runs beside all that needs no MPI, whose output is
shown when tests/launch has ended.

Arguments go to pytest. Those that name files or folders choose the tests, and runs without any of them are left out:

    python tests/run.py -x tests/parallel/test_runtime.py -k threads
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
ORDER = {"passed": 0, "skipped": 1, "failed": 2}
NO_TESTS = 5  # pytest's exit status when its arguments deselect everything


@dataclass(frozen=True)
class Run:
    """One pytest run: a folder of tests, how many ranks, over what, and for how many seconds at most."""

    folder: str
    ranks: int = 1
    controller: str = ""
    timeout: float = 1500.0
    environment: Mapping[str, str] = field(default_factory=dict)

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


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # small tensors gain nothing from more, and the other cores have work
LANES = (  # beside each other
    (Run("tests/launch", timeout=2700.0),),
    (
        Run("tests/single", environment=ONE_THREAD),
        Run("tests/fuzz", environment=ONE_THREAD),
        *(Run("tests/parallel", ranks, "gloo") for ranks in (1, 2, 3, 4)),
    ),
)
# Ranks that wait in MPI keep their cores busy.
ALONE = tuple(Run("tests/parallel", ranks, "mpi") for ranks in (2, 4))

_interrupted = threading.Event()


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


@dataclass(frozen=True)
class Result:
    """What came of a run: how many tests had which outcome, and the seconds that it took."""

    run: Run
    counts: Counter[str]
    seconds: float


def execute(run: Run, paths: list[str], options: list[str], output: IO[str] | None = None) -> Result:
    """Runs it with its output passing through, or into a file."""
    print(f"\n===== {run.title} =====", file=output, flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_tests_") as folder:
        results = Path(folder)
        status = _call(run, run.command(results, [*paths, *options]), output)
        answers = [_read(results / f"{rank}.xml") for rank in range(run.ranks)]
    counts = Counter(_merge([answer for answer in answers if answer is not None]).values())
    if _interrupted.is_set():
        return Result(run, counts, time.monotonic() - start)
    if status is None:
        said = f"error: {run.title} did not end within {run.timeout:g} seconds and was stopped."
        print(said, file=output, flush=True)
        counts["failed"] += 1
    elif (None in answers or status != 0) and not counts["failed"]:
        said = f"error: {run.title} ended with exit status {status} before it could report."
        print(said, file=output, flush=True)
        counts["failed"] += 1
    return Result(run, counts, time.monotonic() - start)


def _call(run: Run, command: list[str], output: IO[str] | None) -> int | None:
    """The exit status of a command, or None if it ran past the limit and was ended with all it started."""
    from hvd_ckpt.probe import launcher_environment

    # Without it a rank that waits in MPI takes the core from one that works, where there are more ranks than cores.
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", **run.environment, **launcher_environment()}
    if run.controller and mpi_works():
        environment["HVD_CKPT_TESTS_MPI_WORKS"] = "1"  # tests/parallel/conftest.py tells why
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + run.timeout
    try:
        while time.monotonic() < deadline and not _interrupted.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
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


@dataclass(frozen=True)
class Job:
    """Runs that follow each other, with what pytest is asked: options, and paths for each run."""

    runs: Sequence[tuple[Run, list[str]]]
    options: list[str]

    def execute(self, output: IO[str] | None = None) -> list[Result]:
        results = []
        for run, paths in self.runs:
            if _interrupted.is_set():
                break
            results.append(execute(run, paths, self.options, output))
        return results


def execute_beside(jobs: Sequence[Job]) -> list[Result]:
    """All jobs at once: the first one's output passes through, the others' is shown when it has ended."""
    with contextlib.ExitStack() as stack:
        outputs: list[IO[str] | None] = [None]
        outputs += [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in jobs[1:]]
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(jobs))))
        futures = [pool.submit(job.execute, output) for job, output in zip(jobs, outputs, strict=False)]
        results: list[Result] = []
        try:
            for future, output in zip(futures, outputs, strict=False):
                results += future.result()
                if output is not None:
                    output.seek(0)
                    shutil.copyfileobj(output, sys.stdout)
        except KeyboardInterrupt:
            _interrupted.set()
            raise
    return results


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

    def job(runs: Sequence[Run]) -> Job:
        wanted = [run for run in runs if any((ROOT / run.folder).rglob("test_*.py"))]
        selected = [(run, paths) for run in wanted if (paths := select(run, chosen))]
        return Job(
            [(run, paths) for run, paths in selected if run.controller != "mpi" or mpi_works()], options
        )

    jobs = [each for each in map(job, LANES) if each.runs]
    results = [*execute_beside(jobs), *job(ALONE).execute()]
    total: Counter[str] = sum((result.counts for result in results), Counter())
    print(f"\n===== all runs, {time.monotonic() - start:.0f} s =====")
    for result in results:
        figures = ", ".join(f"{result.counts[name]} {name}" for name in ORDER)
        print(f"  {result.run.title}: {figures} in {result.seconds:.0f} s")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] or not sum(total.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
