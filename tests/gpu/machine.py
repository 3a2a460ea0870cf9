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
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ckpt.app.cli.doctor import horovod_facts, torch_facts
from hvd_ckpt.app.compare.runner.jobs import JobError
from hvd_ckpt.app.install.cuda import find_nccl, find_toolkit, run_briefly
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.probe import launcher_environment

SECONDS = 120.0  # for a question; the first import of PyTorch after a start of the machine takes long
DRIVERS = ("usr/lib*", "usr/lib/*-linux-gnu", "lib64", "usr/local/nvidia/lib64", "usr/local/cuda/lib64")
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


def system_facts(device: str, cuda: str | None) -> dict[str, str]:
    """The facts of the machine, as lines of a report; an empty text stands for what was not found.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        cuda: the version of CUDA that PyTorch is built for; toolkits of others are no use.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    version = (answer(compiler, "--version") or compiler).split("\n")[0] if compiler else "no C++ compiler"
    facts = {
        "system": f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPUs, {version}",
        "Python.h": str(header) if header.exists() else "",
    }
    if device == "cpu":
        return facts
    drivers = {str(file) for folder in DRIVERS for file in Path("/").glob(f"{folder}/libcuda.so*")}
    home = find_toolkit(cuda) if cuda else None
    nvcc = str(home / "bin" / "nvcc") if home else ""
    release = re.search(r"release [\d.]+", answer(nvcc, "--version") if nvcc else "")
    return facts | {
        "GPUs": "; ".join(gpus()),
        "topology": answer("nvidia-smi", "topo", "-m"),
        "libcuda": ", ".join(sorted(drivers)),
        "nvcc": f"{nvcc} {release.group() if release else ''}".strip(),
        "libnccl.so.2": nccl()[1],
    }


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
