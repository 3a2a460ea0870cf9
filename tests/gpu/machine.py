"""What the checks need to know of this machine, each question with a time limit: GPUs, libraries, PyTorch, Horovod.

Run as a program it prints the answers of PyTorch and Horovod, whose import may fail or hang.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ckpt.app.cli.doctor import horovod_facts, torch_facts
from hvd_ckpt.app.compare.runner.jobs import JobError
from hvd_ckpt.app.install.cuda import find_nccl, run_briefly
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.probe import launcher_environment

SECONDS = 120.0  # for a question; the first import of PyTorch after a start of the machine takes long
QUERY = ("--query-gpu=name,memory.total,compute_cap,driver_version,mig.mode.current", "--format=csv,noheader")
NEEDED = (
    "this machine has no NVIDIA GPU that its driver shows (nvidia-smi); the checks need a GPU with its driver, a PyTorch "
    "built for CUDA, nvcc and a C++ compiler; `bash main.sh gpu --device cpu` runs them on the CPU"
)


def answer(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """The output of a command; nothing if it is missing, fails or takes longer."""
    done = run_briefly(command, SECONDS, environment)
    return "" if done is None or done.returncode else done.stdout.strip()


def gpus() -> list[str]:
    """A line for each GPU that the driver shows: name, memory, compute capability, driver, MIG mode."""
    return (
        answer("nvidia-smi", *QUERY) or answer("nvidia-smi", "-L")
    ).splitlines()  # an old driver knows less


def system_facts(device: str) -> dict[str, str]:
    """The facts of the machine, as lines of a report; what else a build needs, the build says."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    version = (answer(compiler, "--version") or compiler).split("\n")[0] if compiler else "no C++ compiler"
    facts = {"system": f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs, {version}"}
    if device == "cuda":
        (major, minor), library = nccl()
        facts["GPUs"] = "; ".join(gpus())
        facts["topology"] = answer("nvidia-smi", "topo", "-m")
        facts["NCCL"] = f"{library} {major}.{minor}" if library else "not found"
    return facts


def nccl() -> tuple[tuple[int, int], str]:
    """The version and the library of the NCCL that a build of Horovod takes; (0, 0) and nothing if there is none."""
    try:
        headers, library = find_nccl()
    except BuildError:
        return (0, 0), ""
    header = headers / "nccl.h"
    text = header.read_text(errors="replace") if header.exists() else ""
    found = dict(re.findall(r"#define NCCL_(MAJOR|MINOR) (\d+)", text))
    return (int(found.get("MAJOR", 0)), int(found.get("MINOR", 0))), str(library)


def builds() -> tuple[dict[str, Any], dict[str, Any]]:
    """PyTorch and Horovod as they load: :func:`hvd_ckpt.app.cli.doctor.torch_facts` and ``horovod_facts``, or ``error``."""
    # In a process of its own, since importing either may fail, crash or hang.
    text = answer(sys.executable, __file__, environment=launcher_environment())
    if not text:
        missing = {"error": f"it does not load within {SECONDS:.0f} s: run `hvd-ckpt doctor`"}
        return missing, missing
    # Libraries may print lines of their own while they are imported.
    torch, horovod = json.loads(text.splitlines()[-1])
    return torch, horovod


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


if __name__ == "__main__":
    print(json.dumps([torch_facts(), horovod_facts()]))
