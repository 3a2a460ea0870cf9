"""A test of Horovod's operations by two ranks.

The build flags of Horovod do not show what works: a launcher may be missing, a firewall may block the ranks, a library may be of
another build. :func:`probe` starts ranks over one controller, as a user would, and each rank runs this module. It tries every
operation on small tensors and checks the results. A controller that hangs is ended at the time limit.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ckpt.processes.commands import Process, error_line
from hvd_ckpt.processes.mpi import set_single_copy

OPERATIONS = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall")


@dataclass
class ProbeResult:
    """Result of a probe of one controller; ``operations`` maps each device's operations to ``ok`` or an error."""

    works: bool
    reason: str = ""
    seconds: float = 0.0
    operations: dict[str, dict[str, str]] = field(default_factory=dict)


def horovod_build() -> dict[str, str | bool]:
    """The installed Horovod's version, controllers and GPU operations."""
    import horovod
    import horovod.torch as hvd

    nccl = hvd.nccl_built()
    return {
        "version": str(horovod.__version__),
        "mpi": hvd.mpi_built(),
        "gloo": hvd.gloo_built(),
        "cuda": hvd.cuda_built(),
        "nccl": _nccl_version(nccl) if nccl else False,
        "rocm": hvd.rocm_built(),
    }


def _nccl_version(code: int) -> str:
    """NCCL_VERSION_CODE as text: two digits per part since 2.9, one before."""
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"


def probe(controller: str, *, ranks: int = 2, timeout: float = 120.0) -> ProbeResult:
    """Start ``ranks`` local ranks over ``controller`` (``"gloo"`` or ``"mpi"``) and try every operation.

    The controller works if every rank was reached and every operation on CPU tensors gave the right numbers within
    ``timeout`` seconds. Nothing is raised: what went wrong is the result's ``reason``.
    """
    environment = launcher_environment()
    launcher = shutil.which("horovodrun", path=environment["PATH"])
    if launcher is None:
        return ProbeResult(False, "horovodrun was not found next to this Python or on PATH")
    # The ranks of a probe must not write over the timeline of a job.
    environment.pop("HOROVOD_TIMELINE", None)
    with tempfile.TemporaryDirectory(prefix="hvd_ckpt_probe_") as folder:
        how = ["-np", str(ranks), f"--{controller}"]
        command = [launcher, *how, sys.executable, "-m", __spec__.name, folder]
        log_file = Path(folder, "log.txt")
        start = time.monotonic()
        with Process(command, log_file, environment) as process:
            status = process.wait(timeout)
        seconds = round(time.monotonic() - start, 1)
        said = error_line(log_file)
        answers: list[dict[str, dict[str, str]]] = [
            json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))
        ]
    if status is None:
        reason = f"no answer from {ranks - len(answers)} of {ranks} ranks within {timeout:g} seconds"
        return ProbeResult(False, reason, seconds)
    if len(answers) < ranks:
        return ProbeResult(False, f"horovodrun ended with exit status {status}: {said}", seconds)
    # Of each operation the first rank's error, if any rank has one.
    operations = {
        device: {
            name: next((text for each in answers if (text := each[device][name]) != "ok"), "ok")
            for name in OPERATIONS
        }
        for device in answers[0]
    }
    failed = [f"{name}: {text}" for name, text in operations["cpu"].items() if text != "ok"]
    return ProbeResult(not failed, "; ".join(failed), seconds, operations)


def launcher_environment() -> dict[str, str]:
    """This process's environment, in which a launcher finds the programs of this Python environment first, ``mpirun`` too.

    Open MPI 4 wants to find ``ssh`` even where all ranks run on this machine. Where it is missing, a setting lets it do without. So
    does another (:func:`.mpi.set_single_copy`) where ranks cannot read each other's memory.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path}
    if not any(shutil.which(name, path=path) for name in ("ssh", "rsh")):
        environment.setdefault("OMPI_MCA_plm_rsh_agent", "")
    set_single_copy(environment)
    return environment


def _try_operations(hvd: Any, torch: Any, device: str) -> dict[str, str]:
    """Each operation on small tensors of that device, its numbers checked."""
    rank, size = hvd.rank(), hvd.size()
    mine = torch.full((2 * size,), float(rank + 1), dtype=torch.float32, device=device)
    each = [float(other + 1) for other in range(size)]
    total = sum(each)
    tries: dict[str, tuple[Callable[[], Any], list[float]]] = {
        "allreduce": (lambda: hvd.allreduce(mine, op=hvd.Sum, name="probe.allreduce"), [total] * (2 * size)),
        "allgather": (lambda: hvd.allgather(mine[:1], name="probe.allgather"), each),
        "broadcast": (
            lambda: hvd.broadcast(mine, size - 1, name="probe.broadcast"),
            [float(size)] * (2 * size),
        ),
        "reducescatter": (
            lambda: hvd.reducescatter(mine, op=hvd.Sum, name="probe.reducescatter"),
            [total, total],
        ),
        "alltoall": (lambda: hvd.alltoall(mine[:size], name="probe.alltoall"), each),
    }
    answers = {}
    for name, (operation, expected) in tries.items():
        try:
            result = operation().tolist()
            answers[name] = "ok" if result == expected else f"gave {result} instead of {expected}"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return answers


def main(folder: str) -> None:
    """One rank of a probe: try everything and leave the answers in ``folder``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    answers = {"cpu": _try_operations(hvd, torch, "cpu")}
    built = hvd.cuda_built() or hvd.rocm_built()  # without, the first operation would never end
    if built and torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size():
        torch.cuda.set_device(hvd.local_rank())
        answers["cuda"] = _try_operations(hvd, torch, "cuda")
    # Renamed when it is complete: a rank that is killed meanwhile must not leave half an answer.
    temporary = Path(folder, f".{hvd.rank()}")
    temporary.write_text(json.dumps(answers))
    temporary.rename(Path(folder, f"{hvd.rank()}.json"))
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
