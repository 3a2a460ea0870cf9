"""Starting Horovod in one process: environment defaults, threads, and the questions about the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hvd_ckpt import runtime

PREAMBLE = """
import json, os, sys, warnings
import torch
import hvd_ckpt as hc
from hvd_ckpt import runtime
"""


def run_alone(code: str, **environment: str) -> Any:
    """What ``code`` prints as JSON on its last line, run in a fresh process that no launcher started."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOROVOD_", "OMPI_", "OPAL_", "PMIX_", "OMP_"))
    }
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


REPORT = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hc.init()
    hc.init()
print(json.dumps({
    "fusion": os.environ.get("HOROVOD_FUSION_THRESHOLD"),
    "repeatable": runtime.repeatable(),
    "warnings": [str(w.message) for w in caught if "bit for bit" in str(w.message)],
    "threads": torch.get_num_threads(),
    "size": hc.size(),
}))
"""


def test_fusion_is_off_unless_the_user_chose_it() -> None:
    report = run_alone(REPORT)
    assert report["fusion"] == "0"
    assert report["repeatable"]
    assert report["warnings"] == []
    assert report["size"] == 1


def test_a_zero_from_the_user_is_no_reason_to_warn() -> None:
    report = run_alone(REPORT, HOROVOD_FUSION_THRESHOLD="0")
    assert report["repeatable"]
    assert report["warnings"] == []


@pytest.mark.parametrize(
    "setting", [("HOROVOD_FUSION_THRESHOLD", "67108864"), ("HOROVOD_AUTOTUNE", "1")], ids=lambda s: s[0]
)
def test_a_user_who_turns_fusion_on_is_told_once_what_is_lost(setting: tuple[str, str]) -> None:
    name, value = setting
    report = run_alone(REPORT, **{name: value})
    assert report["fusion"] == (value if name == "HOROVOD_FUSION_THRESHOLD" else None)
    assert not report["repeatable"]
    assert len(report["warnings"]) == 1
    assert f"{name}={value}" in report["warnings"][0]


def test_threads_are_this_ranks_share_of_the_cpus() -> None:
    assert run_alone(REPORT)["threads"] == runtime.allowed_cpus()
    assert run_alone(REPORT, OMP_NUM_THREADS="1")["threads"] == 1


@pytest.mark.parametrize(("cpus", "local_size", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch, cpus: int, local_size: int, threads: int) -> None:
    monkeypatch.setattr(runtime, "allowed_cpus", lambda: cpus)
    assert runtime.threads_per_rank(local_size) == threads


@pytest.mark.parametrize(
    ("cpus", "variable", "ranks", "cycle"),
    [
        (2, "HOROVOD_LOCAL_SIZE", 2, "5"),
        (2, "OMPI_COMM_WORLD_LOCAL_SIZE", 4, "10"),
        (3, "HOROVOD_LOCAL_SIZE", 2, "5"),
        (4, "HOROVOD_LOCAL_SIZE", 2, None),
        (1, "HOROVOD_LOCAL_SIZE", 1, None),
    ],
)
def test_ranks_that_share_cpus_wait_quietly(
    monkeypatch: pytest.MonkeyPatch, cpus: int, variable: str, ranks: int, cycle: str | None
) -> None:
    names = ("HOROVOD_CYCLE_TIME", "OMPI_MCA_mpi_yield_when_idle")
    monkeypatch.setattr(runtime, "allowed_cpus", lambda: cpus)
    monkeypatch.setattr(os, "environ", {variable: str(ranks)})
    runtime._set_crowded_defaults()
    assert [os.environ.get(name) for name in names] == [cycle, None if cycle is None else "1"]

    chosen = {variable: str(ranks), "HOROVOD_CYCLE_TIME": "2", "OMPI_MCA_mpi_yield_when_idle": "0"}
    monkeypatch.setattr(os, "environ", dict(chosen))
    runtime._set_crowded_defaults()
    assert os.environ == chosen

    monkeypatch.setattr(os, "environ", {variable: str(ranks), "HOROVOD_AUTOTUNE": "1"})
    runtime._set_crowded_defaults()
    assert "HOROVOD_CYCLE_TIME" not in os.environ


OVER_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
AGAIN = """
def start():
    hc.init()
    return hc.allreduce(torch.ones(1), op=hc.Sum).item()
start()
hc.shutdown()
try:
    print(json.dumps(start()))
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


def test_horovod_starts_again_where_ranks_share_cpus() -> None:
    assert run_alone(AGAIN, OMPI_COMM_WORLD_LOCAL_SIZE="64", **OVER_GLOO) == 1


def test_a_second_start_with_both_variables_set_does_not_kill_the_process() -> None:
    said = run_alone(AGAIN, HOROVOD_FUSION_THRESHOLD="0", HOROVOD_CYCLE_TIME="3", **OVER_GLOO)
    assert said == 1 or "unset HOROVOD_CYCLE_TIME" in said  # a Horovod built elsewhere cannot


def test_importing_starts_no_mpi_and_a_lone_process_finds_it() -> None:
    report = run_alone("""
imported = "mpi4py.MPI" in sys.modules
hc.init()
comm = hc.mpi_communicator() if hc.controller() == "mpi" else None
print(json.dumps({"imported": imported, "controller": hc.controller(), "size": comm and comm.Get_size()}))
""")
    assert not report["imported"]
    if report["controller"] == "mpi":
        assert report["size"] == 1


def test_questions_before_init_name_the_way_out() -> None:
    report = run_alone("""
errors = []
for question in (hc.controller, hc.mpi_communicator):
    try:
        question()
    except RuntimeError as error:
        errors.append(str(error))
print(json.dumps(errors))
""")
    assert len(report) == 2
    assert all("call hvd_ckpt.init() first" in error for error in report)


def test_mpi_is_not_started_twice() -> None:
    report = run_alone("""
hc.init()
kind = hc.controller()
hc.shutdown()
try:
    hc.init()
    print(json.dumps([kind, ""]))
except RuntimeError as error:
    print(json.dumps([kind, str(error)]))
""")
    controller, error = report
    assert ("starts only once" in error) == (controller == "mpi")


def test_gloo_starts_again_after_shutdown() -> None:
    sizes = run_alone(
        "sizes = []\nfor _ in range(2):\n    hc.init(); sizes.append(hc.size()); hc.shutdown()\nprint(json.dumps(sizes))",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
    )
    assert sizes == [1, 1]


def test_what_horovod_was_built_with() -> None:
    build = runtime.horovod_build()
    assert build["version"] == "0.28.1"
    assert build["gloo"] is True
    assert set(build) == {"version", "mpi", "gloo", "cuda", "nccl", "rocm"}


@pytest.mark.parametrize(("code", "text"), [(21903, "2.19.3"), (2708, "2.7.8"), (22903, "2.29.3")])
def test_nccl_version(code: int, text: str) -> None:
    assert runtime._nccl_version(code) == text
