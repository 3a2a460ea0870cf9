"""Tests in this folder run once on every rank: ``horovodrun -np 2 python -m pytest tests/parallel``.

All ranks run the same tests in the same order. A failure ends the session at once (``-x``): the other ranks could otherwise wait in
a collective that never comes.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hvd_ckpt as hc

HANG_SECONDS = 120
# Built on the reducer, whose own tests run over MPI too; what a training run adds is tried there once.
OVER_GLOO_ONLY = (
    "test_estimate.py",
    "test_hugging_face.py",
    "test_microbatch.py",
    "test_offload.py",
    "test_plan.py",
    "test_recipes.py",
    "test_sharded_training.py",
    "test_training.py",
)
OVER_MPI_TOO = ("test_a_run_that_goes_on_ends_in_the_bits_of_one_never_stopped[fp32]",)
FOUR_RANKS_OVER_GLOO_ONLY = (*OVER_GLOO_ONLY, "test_snapshot.py")
# Rules that hold whoever carries the messages: where MPI works, two ranks try them over one controller, four over the other.
EITHER_CONTROLLER = (
    "test_absent.py",
    "test_averaging.py",
    "test_background.py",
    "test_bugs.py",
    "test_commit.py",
    "test_drift.py",
    "test_objects.py",
    "test_optimizer.py",
    "test_precision.py",
    "test_resume.py",
    "test_scenarios.py",
    "test_shard_reducer.py",
    "test_sharded_parameters.py",
    "test_sharding.py",
    "test_stopping.py",
    "test_sync_batch_norm.py",
    "test_turns.py",
)
# What depends most on when messages arrive, and what MPI alone has.
OVER_BOTH = (
    "test_scenarios.py::test_equals_one_process",
    "test_scenarios.py::test_late_gradients",
    "test_sharding.py::test_ends_in_the_weights",
    "::test_adasum",
)
OVER_WHICH = {2: "gloo", 4: "mpi"}
# Where nothing divides evenly and sums have no order that two ranks share: what three ranks may break.
ON_THREE_RANKS = (
    "test_differential.py",
    "test_exchange.py",
    "test_resume.py",
    *(
        f"test_scenarios.py::test_equals_one_process[{graph}-reentrant]"
        for graph in ("Tied", "UnusedOnOneRank", "ChangingGraph", "LateOnOneRank", "ShortLastGroup")
    ),
    "test_sharding.py::test_ends_in_the_weights",
)
MPI_WORKS = "HVD_CKPT_TESTS_MPI_WORKS"  # set by tests/run.py
_status = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.option.maxfail = 1
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    # Milliseconds; with more ranks than cores, the idle cycles of one rank cost the others, over Gloo above all.
    many_over_gloo = int(os.environ.get("HOROVOD_SIZE", "1")) > 2
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "10" if many_over_gloo else "5")
    hc.init()
    if hc.rank() != 0:
        config.option.verbose = -1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not depend on who carries the messages runs over one controller alone."""
    for item in items:
        whole_name = f"{item.path.name}::{item.name}"
        if hc.size() == 3 and not any(part in whole_name for part in ON_THREE_RANKS):
            item.add_marker(pytest.mark.skip(reason="what depends on the number of ranks runs on three"))
        elif (other := left_to(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{hc.size()} ranks run it over {other}"))


def left_to(item: pytest.Item) -> str | None:
    """The controller over which as many ranks run a test, if not over this one."""
    name, size, controller = item.path.name, hc.size(), hc.controller()
    if controller == "mpi":
        only = FOUR_RANKS_OVER_GLOO_ONLY if size == 4 else OVER_GLOO_ONLY
        if name in only and (size == 4 or item.name not in OVER_MPI_TOO):
            return "gloo"
    if name not in EITHER_CONTROLLER or size not in OVER_WHICH or MPI_WORKS not in os.environ:
        return None
    if OVER_WHICH[size] == controller or any(part in f"{name}::{item.name}" for part in OVER_BOTH):
        return None
    return OVER_WHICH[size]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_status] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    """After a failure leaves at once, so that the launcher ends the ranks that still wait for this one."""
    status = config.stash.get(_status, 0)
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture(autouse=True)
def _in_step_with_the_others() -> Iterator[None]:
    """Starts every test from the same random state, in step, and dumps all stacks if it hangs."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    torch.manual_seed(1234)
    hc.barrier()
    yield
    hc.barrier()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def quick_planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three rounds of timing for each kind of block, and one thread: bytes and results are what is looked at."""
    monkeypatch.setattr("hvd_ckpt.planning.profile._SECONDS_PER_KIND", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One temporary folder for all ranks."""
    made = tempfile.mkdtemp(prefix="hvd_ckpt_tests_") if hc.rank() == 0 else ""
    path = Path(hc.broadcast_object(made, 0, name="folder"))
    yield path
    hc.barrier()
    if hc.rank() == 0:
        shutil.rmtree(path)
