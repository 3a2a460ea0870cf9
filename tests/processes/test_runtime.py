"""Tests of starting Horovod in one process: defaults of the environment, threads, and queries about the job."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from forked import Case, Result, run_forked

from hvd_ckpt.processes import probe, runtime

IMPORTS = """
import json, os, re, sys, warnings
import torch
import torch._dynamo  # of optimizers
import hvd_ckpt as hc
from hvd_ckpt.processes import runtime
hc.DistributedOptimizer, hc.broadcast_parameters, hc.allreduce  # imports them once, for all cases
"""
FIRST = r"""
report = {"imported": "mpi4py.MPI" in sys.modules, "errors": []}
model = torch.nn.Linear(1, 1)
questions = (
    hc.controller,
    hc.mpi_communicator,
    hc.rank,
    hc.local_size,
    lambda: hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()),
    lambda: hc.broadcast_parameters(model.state_dict(), root_rank=0),
    lambda: hc.broadcast_object(0, root_rank=0),
)
for question in questions:
    try:
        question()
    except ValueError as error:
        report["errors"].append(str(error))
torch.set_num_threads(100)
if "SHARING" in os.environ:
    runtime.allowed_cpus, runtime._sharing = lambda: 8, lambda ranks: ranks * int(os.environ["SHARING"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hc.init()
    hc.init()
runtime.grid.set_current(runtime.grid.Grid(1, 1, 0, 0, address="kept"))
hc.init(process_sets=[])
report["grid"] = hc.grid().address
report["fusion"] = os.environ.get("HOROVOD_FUSION_THRESHOLD")
report["nvls"] = os.environ.get("NCCL_NVLS_ENABLE")
report["repeatable"] = runtime.repeatable()
texts = [str(warning.message) for warning in caught]
report["warnings"] = [re.search(r"HOROVOD_\w+=\w+", text)[0] for text in texts if "bit for bit" in text]
report["threads"] = torch.get_num_threads()
report["sizes"] = [hc.size(), hc.mpi_communicator().Get_size() if hc.controller() == "mpi" else 1]
report["controller"] = hc.controller()
hc.shutdown()
try:
    hc.init()
    report["again"] = hc.allreduce(torch.ones(1), op=hc.Sum).item()
except RuntimeError as error:
    report["again"] = str(error)
print(json.dumps(report))
"""
OVER_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
SILENT = {"repeatable": True, "warnings": []}
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {  # variables, and what is reported
    "nothing set": (
        {},
        {"imported": False, "fusion": "0", "nvls": "0", "threads": runtime.allowed_cpus(), "sizes": [1, 1]}
        | {"grid": "kept"}  # by a call while Horovod runs
        | SILENT,
    ),
    "fusion off": ({"HOROVOD_FUSION_THRESHOLD": "0", "OMP_NUM_THREADS": "1"}, {**SILENT, "threads": 100}),
    "fusion on": (
        {"HOROVOD_FUSION_THRESHOLD": "67108864", "NCCL_NVLS_ENABLE": "1"},
        {"repeatable": False, "warnings": ["HOROVOD_FUSION_THRESHOLD=67108864"], "nvls": "1"}
        | {"fusion": "67108864"},
    ),
    "autotuned": (
        {"HOROVOD_AUTOTUNE": "1"},
        {"repeatable": False, "warnings": ["HOROVOD_AUTOTUNE=1"], "nvls": "0", "fusion": None},
    ),
    "a share of the CPUs": ({"SHARING": "4"}, {"threads": 2}),
    "gloo": (OVER_GLOO, {"again": 1}),
    "gloo, crowded": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "64", **OVER_GLOO}, {"again": 1}),
    "gloo, both set": ({"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "3", **OVER_GLOO}, {}),
}
LEFT_OUT = ("HOROVOD_", "OMPI_", "OPAL_", "PMIX_", "OMP_", "NCCL_")


# Open MPI on a system that does not let processes read each other's memory: a filter of seccomp, as of Docker, answers the system
# call process_vm_readv with EPERM, and allows all others.
FORBID = """
import ctypes, platform, struct
number = {"x86_64": 310, "aarch64": 270}.get(platform.machine()) or sys.exit(77)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
NO_NEW_PRIVILEGES, SECCOMP = 38, 22
if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
    sys.exit(77)
if libc.prctl(SECCOMP, 2, ctypes.byref(Filter(len(rules), ctypes.addressof(program))), 0, 0):
    sys.exit(77)
from hvd_ckpt.processes.mpi import SINGLE_COPY, set_single_copy
for environment in ({}, {SINGLE_COPY: "cma"}):
    set_single_copy(environment)
    print(environment[SINGLE_COPY])
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Of processes that no launcher started, by the variables that are set."""
    drop = f"for name in list(os.environ):\n    if name.startswith({LEFT_OUT!r}): del os.environ[name]\n"
    code = "os.environ.update({!r})\n"
    cases = {name: Case(drop + code.format(variables) + FIRST) for name, (variables, _) in CASES.items()}
    return run_forked(IMPORTS, {**cases, "no memory of others": Case(FORBID)})


def test_open_mpi_copies_twice_only_where_it_must(results: dict[str, Result]) -> None:
    result = results["no memory of others"]
    if result.returncode == 77:
        pytest.skip("seccomp does not work here")
    assert result.stdout.split() == ["none", "cma"], result.stderr


def report_of(result: Result) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_first_start(results: dict[str, Result], case: str) -> None:
    report, (_, expected) = report_of(results[case]), CASES[case]
    assert {name: report[name] for name in expected} == expected
    assert len(report["errors"]) == 7
    assert all("call hc.init() first" in error for error in report["errors"])


def test_gloo_starts_again_after_shutdown_and_mpi_does_not(results: dict[str, Result]) -> None:
    report = report_of(results["nothing set"])
    assert ("starts only once" in str(report["again"])) == (report["controller"] == "mpi")
    said = report_of(results["gloo, both set"])["again"]
    assert said == 1 or "unset HOROVOD_CYCLE_TIME" in said  # a Horovod built elsewhere cannot


@pytest.mark.parametrize(("cpus", "local_size", "threads"), [(8, 3, 2), (2, 4, 1)])
def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch, cpus: int, local_size: int, threads: int) -> None:
    monkeypatch.setattr(runtime, "allowed_cpus", lambda: cpus)
    assert runtime.threads_per_rank(local_size) == threads


@pytest.mark.parametrize(
    ("cpus", "variable", "ranks", "sharing", "cycle"),
    [
        (2, "HOROVOD_LOCAL_SIZE", 2, 2, "5"),
        (2, "OMPI_COMM_WORLD_LOCAL_SIZE", 4, 4, "10"),
        (4, "HOROVOD_LOCAL_SIZE", 2, 2, None),
        (4, "HOROVOD_LOCAL_SIZE", 8, 1, None),  # each is bound to CPUs of its own
        (1, "HOROVOD_LOCAL_SIZE", 8, 1, "5"),
        (1, "HOROVOD_LOCAL_SIZE", 1, 1, None),
    ],
)
def test_ranks_that_share_cpus_wait_quietly(
    monkeypatch: pytest.MonkeyPatch, cpus: int, variable: str, ranks: int, sharing: int, cycle: str | None
) -> None:
    def defaults(**chosen: str) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", {variable: str(ranks), **chosen})
        runtime._set_crowded_defaults()
        return {name: value for name, value in os.environ.items() if name != variable}

    monkeypatch.setattr(runtime, "allowed_cpus", lambda: cpus)
    monkeypatch.setattr(runtime, "_sharing", lambda ranks: sharing)
    quiet = {"HOROVOD_CYCLE_TIME": cycle, "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert defaults() == (quiet if cycle else {})
    chosen = {"HOROVOD_CYCLE_TIME": "2", "OMPI_MCA_mpi_yield_when_idle": "0"}
    assert defaults(**chosen) == chosen
    assert "HOROVOD_CYCLE_TIME" not in defaults(HOROVOD_AUTOTUNE="1")


def test_what_horovod_was_built_with() -> None:
    build = probe.horovod_build()
    assert build["version"] == "0.28.1"
    assert build["gloo"] is True
    assert set(build) == {"version", "mpi", "gloo", "cuda", "nccl", "rocm"}
    versions = [probe._nccl_version(code) for code in (21903, 2708, 22903)]
    assert versions == ["2.19.3", "2.7.8", "2.29.3"]
