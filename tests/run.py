"""Runs every test: what `bash main.sh test` calls.

conftest.py says which kinds of tests there are. Those of one process and those of whole commands run under plain pytest; those
of ranks run under horovodrun, with 1, 2, 3 and 4 ranks over Gloo and 2 and 4 over MPI where it works. Each rank leaves a JUnit
file. A test failed if it failed on any rank, and a run that crashed, hung or collected nothing counts as one failure. The last
line sums all runs. Four lanes run beside each other, and each takes the next run when it has ended one; the output of the first
passes through, and that of the others follows it.

Arguments go to pytest. Those that name files or folders choose the tests:

    python tests/run.py -x tests/processes/test_runtime.py -k threads

``--quick`` runs the files in ``quick.txt``, some of every room, in one process, on two ranks over Gloo, and as whole commands.
"""

from __future__ import annotations

import atexit
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from helpers.controllers import HOROVODRUN
from helpers.fork_server import fork_server
from helpers.kinds import SELECTIONS, kind_of, sizes_of

ROOT = Path(__file__).resolve().parent.parent
ORDER = {"passed": 0, "skipped": 1, "failed": 2}
QUICK = Path(__file__).with_name("quick.txt")
SLEEP_WHEN_WAITING = Path(__file__).parent / "helpers" / "sleep_when_waiting.c"
NO_TESTS = 5  # pytest's exit status when its arguments deselect everything
LONGEST = 8  # files of each run whose seconds are shown
SECONDS = 2700.0  # that a run may take on a busy machine

_interrupted = threading.Event()


@dataclass(frozen=True)
class Run:
    """One pytest run: its name, the kind of its tests, on how many ranks over what it runs, and whether as forks of one process."""

    title: str
    kind: str
    ranks: int = 1
    controller: str = ""
    paths: tuple[str, ...] = ("tests",)

    @property
    def forked(self) -> bool:
        """Fresh interpreters, each with its own order of sets, run the tests of two ranks."""
        return (self.ranks, self.controller) != (2, "gloo")

    def command(self, results: Path, arguments: Sequence[str]) -> list[str]:
        worker = [sys.executable, str(ROOT / "tests" / "run.py"), "--worker", str(results), *arguments]
        if not self.controller:
            return [*worker, "-m", SELECTIONS[self.kind]]
        launcher = HOROVODRUN if self.forked else [str(Path(sys.executable).parent / "horovodrun")]
        return [*launcher, "-np", str(self.ranks), f"--{self.controller}", *worker, "--color=no"]


def _over(controller: str, *sizes: int) -> tuple[Run, ...]:
    return tuple(Run(f"{size} ranks over {controller}", "ranks", size, controller) for size in sizes)


LANES = 4  # ranks wait for each other, so more of them than cores
# Runs of their own, so that no lane has much more to do than the others.
LONG = ("tests/bench", "tests/parallel")
PLANS = ("tests/planning", "tests/prediction", "tests/zoo")


def _without(folders: tuple[str, ...]) -> tuple[str, ...]:
    return ("tests", *(f"--ignore={folder}" for folder in folders))


RUNS = (  # the longest first
    *_over("gloo", 2),
    Run("whole commands", "launch", paths=_without(LONG)),
    Run("whole commands of benchmarks and parallel models", "launch", paths=LONG),
    Run("one process", "process", paths=_without(PLANS)),
    Run("one process for plans and predictions", "process", paths=PLANS),
    *_over("mpi", 4),
    Run("several hosts", "hosts"),
    *_over("gloo", 1, 3, 4),
    *_over("mpi", 2),
)


def belongs(path: str, run: Run) -> bool:
    """Whether a run has a test in a file, or in a folder."""
    place = ROOT / path.split("::")[0]
    files = place.rglob("test_*.py") if place.is_dir() else [place]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return any(
        kind_of(text) == run.kind and (run.kind != "ranks" or run.ranks in sizes_of(text)) for text in texts
    )


@functools.cache
def mpi_works() -> bool:
    """Whether ranks can be started over MPI here; where they cannot, this says so once."""
    from hvd_ckpt.processes.probe import probe

    answer = probe("mpi")
    if not answer.works:
        print(f"\nMPI does not work here ({answer.reason}): its runs are left out.", flush=True)
    return answer.works


@functools.cache
def temporary_folder() -> str:
    """A folder until this process ends."""
    folder = tempfile.mkdtemp(prefix="hvd_ckpt_tests_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def sleeping_wait() -> str | None:
    """The library to preload so that a wait in MPI sleeps; None where there is no C compiler."""
    library = f"{temporary_folder()}/sleep_when_waiting.so"
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, str(SLEEP_WHEN_WAITING)]
    made = compiler is not None and subprocess.run(command, capture_output=True).returncode == 0
    return library if made else None


class Result(NamedTuple):
    """How many tests of a run had which outcome, and the seconds that it and each of its files took."""

    run: Run
    counts: Counter[str]
    seconds: float
    files: Counter[str]


def shared_environment() -> dict[str, str]:
    """The environment variables of all runs."""
    from hvd_ckpt.processes.probe import launcher_environment

    # A rank that waits in MPI would take the core from one that works: there are more ranks than cores.
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", **launcher_environment()}
    # Hundreds of processes import PyTorch: what is compiled must be kept, here if not beside the sources.
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        environment["PYTHONPYCACHEPREFIX"] = f"{temporary_folder()}/compiled"
    if library := sleeping_wait():
        environment["LD_PRELOAD"] = " ".join(filter(None, [library, environment.get("LD_PRELOAD")]))
    return environment


def execute(
    run: Run, arguments: Sequence[str], variables: Mapping[str, str], output: IO[str] | None = None
) -> Result:
    """Runs it with its output passing through, or into a file; ``variables`` are those of forks."""
    print(f"\n===== {run.title} =====", file=output, flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_tests_") as folder:
        results = Path(folder)
        environment = {**shared_environment(), **(variables if run.forked else {})}
        status = _call(run, run.command(results, arguments), environment, output)
        seconds = [Counter[str]() for _ in range(run.ranks)]
        outcomes = [_outcomes(results / f"{rank}.xml", seconds[rank]) for rank in range(run.ranks)]
    counts = Counter(_merge([one for one in outcomes if one is not None]).values())
    problem = None
    if status is None:
        problem = f"did not end within {SECONDS:g} seconds and was stopped"
    elif (None in outcomes or status != 0) and not counts["failed"]:
        problem = f"ended with exit status {status} before it could report"
    if problem and not _interrupted.is_set():
        print(f"error: {run.title} {problem}.", file=output, flush=True)
        counts["failed"] += 1
    return Result(run, counts, time.monotonic() - start, seconds[0])


def _call(run: Run, command: list[str], environment: dict[str, str], output: IO[str] | None) -> int | None:
    """The exit status of a command, or None if it ran past the limit and was ended with all it started."""
    # Small tensors gain nothing from a second thread, and the other core has work.
    if run.kind == "process":
        environment["OMP_NUM_THREADS"] = "1"
    if run.controller and mpi_works():
        environment["HVD_CKPT_TESTS_MPI_WORKS"] = "1"  # conftest.py tells why
    errors = None if output is None else subprocess.STDOUT
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline and not _interrupted.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # a launcher that is asked to end also ends its ranks, which are in other sessions
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def execute_beside(runs: Sequence[tuple[Run, list[str]]], variables: Mapping[str, str]) -> list[Result]:
    """All runs in lanes beside each other: the first one's output passes through, the others' is shown when it has ended."""
    left = iter(runs)  # of all lanes

    def follow(output: IO[str] | None) -> list[Result]:
        return [
            execute(run, arguments, variables, output) for run, arguments in left if not _interrupted.is_set()
        ]

    with contextlib.ExitStack() as stack:
        outputs: list[IO[str] | None] = [None]
        outputs += [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(LANES - 1)]
        pool = stack.enter_context(ThreadPoolExecutor(LANES))
        futures = [pool.submit(follow, output) for output in outputs]
        results: list[Result] = []
        try:
            for future, output in zip(futures, outputs, strict=True):
                results += future.result()
                if output is not None:
                    output.seek(0)
                    shutil.copyfileobj(output, sys.stdout)
        except KeyboardInterrupt:
            _interrupted.set()
            raise
    return results


def _outcomes(path: Path, seconds: Counter[str]) -> dict[str, str] | None:
    """Each test's outcome in one rank's JUnit file, whose seconds it adds up; None if that rank did not get to write it."""
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
        seconds[case.get("classname", "")] += float(case.get("time", 0))
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

    from hvd_ckpt.processes.launchers import launched_rank

    rank = launched_rank() or 0
    status = int(pytest.main([f"--junitxml={results}/{rank}.xml", *arguments]))
    return 0 if status == NO_TESTS else status  # a launcher would take any other status for a crash


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--worker"]:
        return work(arguments[1], arguments[2:])
    start = time.monotonic()
    named = [one for one in arguments if not one.startswith("-") and (ROOT / one.split("::")[0]).exists()]
    options = [one for one in arguments if one not in named]
    possible = RUNS
    if "--quick" in options:
        options.remove("--quick")
        named = QUICK.read_text(encoding="utf-8").split()
        possible = tuple(run for run in RUNS if run in _over("gloo", 2) or run.kind in ("launch", "process"))

    runs = []
    for run in possible:
        chosen = [path for path in named if run.paths[0] == "tests" and belongs(path, run)]
        paths = chosen if named else run.paths
        if paths and (run.controller != "mpi" or mpi_works()):
            runs.append((run, [*options, *paths]))
    with fork_server(shared_environment()) as variables:
        results = execute_beside(runs, variables)
    total: Counter[str] = sum((result.counts for result in results), Counter())
    print(f"\n===== all runs, {time.monotonic() - start:.0f} s =====")
    for result in results:
        figures = ", ".join(f"{result.counts[name]} {name}" for name in ORDER)
        print(f"  {result.run.title}: {figures} in {result.seconds:.0f} s")
        longest = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.files.most_common(LONGEST))
        print(f"    longest: {longest}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] or not sum(total.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
