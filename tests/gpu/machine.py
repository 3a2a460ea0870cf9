"""What the checks need to know of this machine, each question with a time limit: GPUs, libraries, PyTorch, builds of Horovod.

Run as a program it prints the answers of PyTorch and Horovod, whose import may fail or hang.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ckpt.app.cli.doctor import horovod_facts, torch_facts
from hvd_ckpt.app.compare.runner.jobs import JobError
from hvd_ckpt.app.install.cuda import find_nccl, find_toolkit, run_briefly
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.probe import launcher_environment
from hvd_ckpt.utils.folders import cache_folder

SECONDS = 120.0  # for a question; the first import of PyTorch after a start of the machine takes long
DRIVER_FOLDERS = (
    "usr/lib*",
    "usr/lib/*-linux-gnu",
    "lib64",
    "usr/local/nvidia/lib64",
    "usr/local/cuda/lib64",
)
QUERY = ("--query-gpu=name,memory.total,compute_cap,driver_version,mig.mode.current", "--format=csv,noheader")
NEEDED = (
    "this machine has no NVIDIA GPU that its driver shows (nvidia-smi); the checks need a GPU with its driver, a PyTorch "
    "built for CUDA, nvcc and a C++ compiler; `bash main.sh gpu --device cpu` runs them on the CPU"
)
BUILD_STAGED = "HOROVOD_GPU_OPERATIONS=HOST hvd-ckpt build-horovod --no-install"


def answer(
    command: Sequence[str], seconds: float = SECONDS, environment: Mapping[str, str] | None = None
) -> str | None:
    """The output of a command; None if it is missing, fails or takes longer."""
    done = run_briefly(command, seconds, environment)
    return None if done is None or done.returncode else done.stdout.strip()


def gpus() -> list[str]:
    """A line for each GPU that the driver shows: name, memory, compute capability, driver, MIG mode."""
    lines = answer(["nvidia-smi", *QUERY]) or answer(["nvidia-smi", "-L"])  # an old driver knows fewer facts
    return (lines or "").splitlines()


def system_facts(device: str, cuda: str | None) -> dict[str, str]:
    """The facts of the machine, as lines of a report; an empty text stands for what was not found.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        cuda: the version of CUDA that PyTorch is built for; toolkits of others are no use.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    facts = {
        "system": f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs, {_compiler()}",
        "Python.h": str(header) if header.exists() else "",
    }
    if device == "cpu":
        return facts
    drivers = {str(file) for folder in DRIVER_FOLDERS for file in Path("/").glob(f"{folder}/libcuda.so*")}
    return facts | {
        "GPUs": "; ".join(gpus()),
        "topology": answer(["nvidia-smi", "topo", "-m"]) or "",
        "libcuda": ", ".join(sorted(drivers)),
        "nvcc": _nvcc(cuda) if cuda else "",
        "libnccl.so.2": _nccl(),
    }


def _nvcc(cuda: str) -> str:
    home = find_toolkit(cuda)
    if home is None:
        return ""
    release = re.search(r"release [\d.]+", answer([str(home / "bin" / "nvcc"), "--version"]) or "")
    return f"{home / 'bin' / 'nvcc'} {release.group() if release else ''}".strip()


def nccl_version() -> tuple[int, int]:
    """The version of NCCL that a build of Horovod takes; (0, 0) if there is none."""
    try:
        header = (find_nccl()[0] / "nccl.h").read_text(errors="replace")
    except (BuildError, OSError):
        return 0, 0
    found = dict(re.findall(r"#define NCCL_(MAJOR|MINOR) (\d+)", header))
    return int(found.get("MAJOR", 0)), int(found.get("MINOR", 0))


def _nccl() -> str:
    try:
        return str(find_nccl()[1])
    except BuildError:
        return ""


@dataclass(frozen=True)
class Builds:
    """PyTorch and Horovod as they load, and what else was built of Horovod.

    Attributes:
        torch, horovod: of :func:`hvd_ckpt.app.cli.doctor.torch_facts` and ``horovod_facts``, or ``error``.
        staged: variables of the environment in which Horovod copies the tensors of GPUs to the host; None without such a build.
    """

    torch: dict[str, Any] = field(default_factory=dict)
    horovod: dict[str, Any] = field(default_factory=dict)
    staged: dict[str, str] | None = None


def builds(folder: Path) -> Builds:
    """The builds of this environment; a wheel of Horovod that stages through the host is unpacked into the folder."""
    # In a process of its own, since importing either may fail, crash or hang.
    text = answer([sys.executable, __file__], environment=launcher_environment())
    if text is None:
        missing = {"error": f"it does not load within {SECONDS:.0f} s: run `hvd-ckpt doctor`"}
        return Builds(missing, missing)
    # Libraries may print lines of their own while they are imported.
    loaded = json.loads(text.splitlines()[-1])
    torch, horovod = loaded["torch"], loaded["horovod"]
    # This environment's Horovod copies to the host already.
    if horovod.get("cuda") and not horovod.get("nccl"):
        return Builds(torch, horovod, {})
    return Builds(torch, horovod, _staged_environment(folder) if torch.get("devices") else None)


def _staged_environment(folder: Path) -> dict[str, str] | None:
    environment = {**os.environ, "HOROVOD_GPU_OPERATIONS": "HOST"}
    key = (
        answer(
            [sys.executable, "-m", "hvd_ckpt.app.install.build_horovod", "--print-key"],
            environment=environment,
        )
        or ""
    )
    # The name has the operations that the build would have; any others mean that HOST is not possible here.
    wheels = list((cache_folder() / key).glob("*.whl")) if "-host-" in key else []
    if not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    # The extension looks for MPI relative to site-packages.
    added = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(Path(sys.prefix, "lib"))}
    return {name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in added.items()}


def run_command(command: Sequence[str], log: Path, environment: Mapping[str, str], timeout: float) -> None:
    """Runs a command with its output in a log.

    Raises:
        JobError: it failed, or took longer than ``timeout`` seconds.
    """
    with Process(command, log, environment) as process:
        status = process.wait(timeout)
    if status is None:
        raise JobError(f"no end after {timeout:.0f} s (log: {log})")
    if status != 0:
        raise JobError(f"{error_line(log)} (status {status}, log: {log})")


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return (answer([compiler, "--version"]) or compiler).split("\n")[0] if compiler else "no C++ compiler"


if __name__ == "__main__":
    print(json.dumps({"torch": torch_facts(), "horovod": horovod_facts()}))
