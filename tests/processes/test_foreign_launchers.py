"""Tests of jobs that torchrun or Slurm's srun starts: their ranks find each other, and Horovod runs over Gloo."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from hvd_ckpt.processes.launchers import COUNTS, FOREIGN, RANK_VARIABLES, foreign_launcher, launched_size
from hvd_ckpt.processes.rendezvous import first_host, rank_variables

pytestmark = pytest.mark.launch

SCRIPT = """
import sys, torch, hvd_ckpt as hc
hc.init(stages=int(sys.argv[1]))
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = hc.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
torch.manual_seed(hc.rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
place = f"{hc.grid().stage} {hc.rank()}/{hc.size()} {hc.local_rank()}/{hc.local_size()} {hc.controller()}"
print(f"{place} {model.weight.detach().double().sum().item()!r}\\n", end="", flush=True)
"""


def environment() -> dict[str, str]:
    """That of a launcher which knows of no other one."""
    others = (*RANK_VARIABLES, "SLURM_", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**clean, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@contextlib.contextmanager
def step(command: list[str], cpus: Sequence[Iterable[int]], **variables: str) -> Iterator[list[Any]]:
    """The ranks of a job step with the variables of srun, each on these CPUs."""
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environment(), **variables, "SLURM_PROCID": str(rank)},
            stdin=pipe, stdout=pipe, text=True, bufsize=1,
            preexec_fn=lambda own=own: os.sched_setaffinity(0, own),
        )
        for rank, own in enumerate(cpus)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def by_slurm(script: Path, stages: int) -> list[str]:
    """What two ranks print."""
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    variables["MASTER_PORT"] = str(get_free_port())
    with step([str(script), str(stages)], [os.sched_getaffinity(0)] * 2, **variables) as ranks:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    # Some versions of PyTorch print a line for each of their Gloo groups.
    return sorted(line for output in outputs for line in output.splitlines() if not line.startswith("[Gloo]"))


def test_torchrun_and_srun_start_the_same_job(script: Path) -> None:
    words = f"-m torch.distributed.run --nproc-per-node 2 --master-port {get_free_port()} {script} 1".split()
    started = subprocess.run(
        [sys.executable, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    lines = sorted(started.stdout.splitlines())
    assert [line.rpartition(" ")[0] for line in lines] == ["0 0/2 0/2 gloo", "0 1/2 1/2 gloo"]
    assert lines[0].split()[-1] == lines[1].split()[-1]  # equal weights
    assert by_slurm(script, 1) == lines


def test_stages_in_a_job_of_slurm(script: Path) -> None:
    lines = by_slurm(script, 2)
    assert [line.rpartition(" ")[0] for line in lines] == ["0 0/1 0/1 gloo", "1 0/1 0/1 gloo"]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
OTHERS = ("HOROVOD_CONTROLLER", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "PMI_SIZE", "SLURM_NTASKS")


@pytest.mark.parametrize(
    ("variables", "launcher", "size"),
    [
        ({}, None, 1),
        (TORCHRUN, "torchrun", 1),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, 1),  # of anybody
        ({**TORCHRUN, **SRUN, "PMIX_RANK": "0"}, "torchrun", 2),
        ({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "0"}, "torchrun", 1),  # mpirun has started torchrun
        (SRUN, "srun", 1),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None, 1),  # a shell in an allocation
        ({**SRUN, "PMIX_RANK": "1"}, None, 2),  # MPI knows it
        ({**SRUN, "PMIX_RANK": "1", "HOROVOD_CONTROLLER": "gloo"}, "srun", 2),
        ({**SRUN, "OMPI_COMM_WORLD_RANK": "1"}, None, 1),
        ({**SRUN, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, None, 1),  # horovodrun within a step
        ({"HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, None, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, None, 3),  # mpiexec of MPICH, srun --mpi=pmi2
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}, None, 4),  # srun --mpi=pmix
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "8"}, None, 8),
        ({"SLURM_NTASKS": "8"}, None, 1),  # a shell in an allocation
    ],
)
def test_only_ranks_that_nobody_else_knows_are_foreign_and_the_number_of_ranks(
    variables: dict[str, str], launcher: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*COUNTS, *RANK_VARIABLES, *OTHERS, *itertools.chain(*FOREIGN.values())}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert foreign_launcher() == launcher
    assert launched_size() == size


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("b2,b1", "b2"), ("gpu[03-05,9],login", "gpu03"), ("r[1-2]n[4,6]", "r1n4")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_places_of_ranks_where_hosts_have_different_numbers() -> None:
    found = rank_variables("aabba", "10.0.0.1", 5)
    places = {
        "LOCAL_RANK": [0, 1, 0, 1, 2],
        "LOCAL_SIZE": [3, 3, 2, 2, 3],
        "CROSS_RANK": [0, 0, 1, 1, 0],
        "CROSS_SIZE": [2, 2, 2, 2, 1],
    }
    for name, expected in places.items():
        assert [int(one[f"HOROVOD_{name}"]) for one in found] == expected


SHARING = """
print("started", flush=True)
input()
from hvd_ckpt.processes.ancestry import ranks_sharing_cpus
print(ranks_sharing_cpus({}), flush=True)
input()
"""


@pytest.mark.parametrize(
    ("bound", "ranks", "sharing"),
    [
        ([[0], [1]], 2, 1),
        ([[0], [0], [1], [1]], 4, 2),  # as mpirun binds to sockets
        ([[0, 1], [0, 1]], 2, 2),
        ([[0], [1]], 3, 3),  # one is not to be seen
    ],
)
def test_ranks_that_share_cpus(bound: list[list[int]], ranks: int, sharing: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    with step(["-c", SHARING.format(ranks)], [[cpus[number] for number in own] for own in bound]) as started:
        assert [rank.stdout.readline() for rank in started] == ["started\n"] * len(bound)
        for rank in started:
            rank.stdin.write("\n")
        assert [int(rank.stdout.readline()) for rank in started] == [sharing] * len(bound)
