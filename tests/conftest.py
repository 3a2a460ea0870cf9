"""Tests lie in one folder per room of hvd_ckpt. A file's marker says how its tests run:

- without a marker in one process: ``pytest tests/recompute``;
- ``pytest.mark.launch`` runs whole commands, and takes longer; with ``pytest.mark.hosts``, too, on several hosts;
- ``pytest.mark.ranks(gloo=(1, 2), mpi=(4,))`` runs once on every rank, on 1 and 2 ranks over Gloo and on 4 over MPI:
  ``horovodrun -np 2 --gloo python -m pytest tests/reduction``. A test's own marker goes before its file's. Where MPI does not
  work, its numbers of ranks run over Gloo, too.

Under a launcher only the files of the last kind are collected, and without one all others. All ranks run the same tests in the same
order. A failure there ends the session at once (``-x``): the other ranks could otherwise wait in a collective that never comes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from all_ranks import folder_of_all_ranks
from controllers import HOROVODRUN
from fork_server import fork_server, is_running
from kinds import SELECTIONS, kind_of, sizes_of
from quick_planner import quick_planner

import hvd_ckpt as hc
from hvd_ckpt.processes.launchers import RANK_VARIABLES

HANG_SECONDS = 300
MPI_WORKS = "HVD_CKPT_TESTS_MPI_WORKS"  # set by tests/run.py
LAUNCHED = any(name in os.environ for name in RANK_VARIABLES)
_status = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if not LAUNCHED:
        return
    config.option.maxfail = 1
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    # Milliseconds; with more ranks than cores, the idle cycles of one rank cost the others, over Gloo above all.
    many_over_gloo = int(os.environ.get("HOROVOD_SIZE", "1")) > 2
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "10" if many_over_gloo else "5")
    hc.init()
    if hc.rank() != 0:
        config.option.verbose = -1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of another kind, and of other numbers of ranks, before they are imported."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    kind = kind_of(text)
    if LAUNCHED:
        return None if kind == "ranks" and hc.size() in sizes_of(text) else True
    if kind == "ranks":
        return True
    only = {selection: kind for kind, selection in SELECTIONS.items()}.get(config.option.markexpr)
    return None if only in (None, kind) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what does not run on this number of ranks over this controller."""
    if LAUNCHED:
        config.hook.pytest_deselected(items=[item for item in items if not _runs_here(item)])
        items[:] = filter(_runs_here, items)


def _runs_here(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("ranks")
    assert marker is not None, item.nodeid
    over = {name: tuple(marker.kwargs.get(name, ())) for name in ("gloo", "mpi")}
    if MPI_WORKS not in os.environ:
        over["gloo"] += over["mpi"]
    return hc.size() in over[hc.controller()]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is never looked at again when garbage is collected, which tests do often."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Shows a failure on ranks at once: if another rank waits for this one, the session does not come to its end."""
    if LAUNCHED and report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_status] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """After a failure leaves at once, so that the launcher ends the ranks that still wait for this one."""
    status = config.stash.get(_status, 0)
    if LAUNCHED and status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture(autouse=True)
def _in_step_with_the_others(pytestconfig: pytest.Config) -> Iterator[None]:
    """On ranks, starts every test from the same random state, in step, and dumps all stacks if it hangs."""
    if not LAUNCHED:
        yield
        return
    # What is written to the stderr of a test is lost when this ends the process.
    stderr = pytestconfig.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=stderr)
    torch.manual_seed(1234)
    hc.barrier()
    yield
    hc.barrier()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for tiny operators, which would mostly wait for each other on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="quick_planner")
def _quick_planner(one_thread: None) -> Iterator[None]:
    """Plans with few measurements."""
    with quick_planner():
        yield


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks and commands that tests start are forks of one process (helpers/forking/), whose launchers look for no controllers."""
    if LAUNCHED or not any(item.get_closest_marker("launch") for item in request.session.items):
        yield
        return
    from hvd_ckpt.app.compare.runner import jobs

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not is_running():
            for name, value in stack.enter_context(fork_server()).items():
                patch.setenv(name, value)
        started = jobs.launch_command
        patch.setattr(
            jobs, "launch_command", lambda *words, **more: [*HOROVODRUN, *started(*words, **more)[3:]]
        )
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """One temporary folder for all ranks."""
    with folder_of_all_ranks() as path:
        yield path


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """One for all tests of a file."""
    with folder_of_all_ranks() as path:
        yield path
