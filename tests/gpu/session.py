"""A machine under check: its facts, its build of Horovod, and the ranks of a check."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpu import machine
from gpu.machine import run_command
from gpu.training import CheckJob, Outcome

from hvd_ckpt.app.compare.runner.jobs import JobError, rank_environment, run_job
from hvd_ckpt.app.install.recipe import HOROVOD_VERSION
from hvd_ckpt.processes.devices import LINK_VARIABLE

LEAST_SECONDS = 5.0  # a check is not started with less
MULTI_RANK = (2, 30)
"""The first NCCL that takes several ranks on one GPU, where ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1."""
NEWER = ".".join(map(str, MULTI_RANK))
SHARED = (
    f"several ranks on one GPU need NCCL {NEWER} (PyTorch's package nvidia-nccl), or a Horovod that stages through "
    "the host: HOROVOD_GPU_OPERATIONS=HOST bash main.sh gpu"
)


@dataclass
class Session:
    """A run of the checks on ``"cuda"`` or ``"cpu"``, with the folder for their logs.

    ``end`` is when time is over, on the monotonic clock; ``offline`` has what the build would fetch. ``facts`` are those of the
    machine for the report, ``torch`` and ``horovod`` those of :func:`gpu.machine.builds`; ``digests`` are the bits that checks
    ended in.
    """

    device: str
    jobs: Path
    end: float
    offline: Path | None = None
    facts: dict[str, str] = field(default_factory=dict)
    torch: dict[str, Any] = field(default_factory=dict)
    horovod: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Number of GPUs that PyTorch sees."""
        return len(self.torch.get("devices", ())) if self.device == "cuda" else 0

    @property
    def ranks(self) -> int:
        """The number of ranks of a check of several: one for each GPU, else 2."""
        return max(2, self.gpus)

    @property
    def shares_by_nccl(self) -> bool:
        """Whether NCCL takes several ranks on one GPU here."""
        return bool(self.horovod.get("nccl")) and machine.nccl()[0] >= MULTI_RANK

    def look(self) -> str:
        """Finds the facts of the machine, of PyTorch and of Horovod; returns them in one line.

        Raises:
            JobError: PyTorch does not load, or finds no GPU.
        """
        self.note_builds()
        torch = self.torch
        self.facts |= machine.system_facts(self.device)
        if "error" in torch:
            raise JobError(f"PyTorch: {torch['error']}")
        build = f"CUDA {torch['cuda_built']}, NCCL {torch['nccl']}, {len(torch['devices'])} GPUs"
        self.facts["PyTorch"] = f"{torch['version']}, {build}"
        if self.device == "cuda" and not torch["devices"]:
            cpu = torch["cuda_built"] is None
            why = "is built for the CPU" if cpu else "finds no GPU, as with a driver that is too old for it"
            way_out = "install one for this machine's driver, as pytorch.org says"
            raise JobError(f"PyTorch {torch['version']} {why}: {way_out}")
        return self.facts["GPUs" if self.device == "cuda" else "system"]

    def note_builds(self) -> None:
        """Looks at PyTorch and Horovod, whose build is a fact."""
        self.torch, self.horovod = machine.builds()
        self.facts["Horovod"] = ", ".join(f"{name} {value}" for name, value in self.horovod.items() if value)

    def build(self, seconds: float) -> str:
        """Builds Horovod for these GPUs, unless that is done, with an NCCL that takes several ranks on one GPU where there is one.

        Raises:
            JobError: it cannot be built.
        """
        seconds = self.left(seconds)
        command = [sys.executable, "-m", "hvd_ckpt.app.install.build_horovod"]
        if self.offline is not None:
            command += ["--sdist", str(self.offline / f"horovod-{HOROVOD_VERSION}.tar.gz")]
        if self.device == "cuda":
            if self.gpus == 1 and self.offline is None and machine.nccl()[0] < MULTI_RANK:
                newer = f"nvidia-nccl-cu{str(self.torch['cuda_built']).partition('.')[0]}>={NEWER}"
                pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-deps", newer]
                try:
                    run_command([sys.executable, *pip], self.log("nccl"), rank_environment(), seconds)
                except JobError as error:
                    print(f"{newer} could not be installed: {error}")
            run_command(command, self.log("build"), rank_environment(), seconds)
            self.note_builds()
        if "error" in self.horovod:
            raise JobError(str(self.horovod["error"]))
        if self.device == "cuda" and not self.horovod["cuda"]:
            raise JobError("Horovod is built without CUDA; the build's log says why (is nvcc missing?)")
        return self.facts["Horovod"]

    def run(
        self, function: str, name: str, seconds: float, ranks: int, environment: Mapping[str, str]
    ) -> Outcome:
        """Runs a function of :mod:`gpu.checks` on so many ranks; returns what rank 0 found.

        Raises:
            JobError: a rank failed, or the check took longer than ``seconds``.
        """
        folder = self.jobs / name.replace(" ", "-")
        job = CheckJob(folder, ranks, function, self.device, tiny=self.device == "cpu")
        # A rank chooses its GPU before it calls use_deterministic_kernels(), which would set the first variable only then.
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment}
        if self.device == "cpu":
            variables[LINK_VARIABLE] = "gloo"  # in place of NCCL, with the link that GPUs have
        if 0 < self.gpus < ranks and self.shares_by_nccl:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        controller = "gloo" if self.horovod["gloo"] else "mpi"
        # The same for all checks, as bits depend on it.
        threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
        limit = self.left(seconds)
        return run_job(job, Outcome, controller, limit, threads=threads, environment=variables)[0]

    def left(self, seconds: float) -> float:
        """What is left of a time limit; skips the test where time is over."""
        left = min(seconds, self.end - time.monotonic())
        if left < LEAST_SECONDS:
            pytest.skip("the time is over: give more --minutes, or choose checks with -k")
        return left

    def log(self, name: str) -> Path:
        """The file for the output of a command."""
        return self.jobs / name / "log.txt"

    def need(self, *needs: str, ranks: int = 1) -> None:
        """Skips the test where one of these is missing: ``horovod``, ``GPU``, ``ranks`` (so many), ``NCCL`` (over them)."""
        horovod, on_gpus = self.horovod, self.device == "cuda"
        staged = horovod.get("cuda") and not horovod.get("nccl")  # copies to the host
        shares = staged or self.shares_by_nccl
        over_nccl = horovod.get("nccl") and (self.gpus > 1 or self.shares_by_nccl)
        for is_missing, reason in (
            ("error" in self.torch, "PyTorch does not load"),
            ("error" in horovod, "Horovod does not load"),
            (on_gpus and not horovod.get("cuda"), "Horovod is built without CUDA"),
            (on_gpus and not self.gpus, "PyTorch finds no GPU"),
            ("GPU" in needs and not on_gpus, "it needs a GPU"),
            ("ranks" in needs and 0 < self.gpus < ranks and not shares, SHARED),
            (
                "NCCL" in needs and on_gpus and not over_nccl,
                f"it needs NCCL and several GPUs, or NCCL {NEWER}",
            ),
        ):
            if is_missing:
                pytest.skip(reason)
