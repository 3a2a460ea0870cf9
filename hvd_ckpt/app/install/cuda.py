"""CUDA for Horovod's build: whether its operations run on GPUs, the toolkit that compiles them, and NCCL.

For a CUDA PyTorch, operations on GPUs are built if the machine has a GPU, for its architecture only: all architectures of nvcc
take ten times as long. Two variables of Horovod request a build on any machine: ``HOROVOD_GPU_OPERATIONS``, with one of
:data:`OPERATIONS`, for all architectures of nvcc, and ``HOROVOD_BUILD_CUDA_CC_LIST`` for the architectures in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.app.install.prerequisites import BuildError

OPERATIONS_VARIABLE, ARCHITECTURES_VARIABLE = "HOROVOD_GPU_OPERATIONS", "HOROVOD_BUILD_CUDA_CC_LIST"
OPERATIONS = ("NCCL", "HOST", "CPU")
"""NCCL; copies to the host and reductions there (for ranks that share a GPU); no operations on GPUs."""
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
NVCC_WHEELS = ("cu{major}", "cuda_nvcc")  # folders in site-packages/nvidia, since CUDA 13 and before
TOOLKIT_WHEELS = ("cuda_runtime", "cuda_cccl", "nvtx")  # folders beside cuda_nvcc: headers and libraries
SECONDS = 60  # longest run of nvidia-smi and nvcc


@dataclass(frozen=True)
class GpuOperations:
    """Operations of Horovod for GPU tensors.

    Attributes:
        kind: ``"NCCL"`` or ``"HOST"``; None for a Horovod without operations on GPUs.
        home: folder of the CUDA toolkit.
        architectures: compute capabilities to compile for, such as ``80,90``; None for all that nvcc supports.
        described: a description in one line, with the way to another build.
    """

    kind: str | None
    home: str | None
    architectures: str | None
    described: str


def choose_gpu_operations(torch: str, cuda: str | None) -> GpuOperations:
    """Chooses the operations on GPUs of a build for this PyTorch.

    Args:
        cuda: version of CUDA that PyTorch was built for, or None.

    Raises:
        BuildError: the user requests a build that is not supported or not possible on this machine.
    """
    operations = os.environ.get(OPERATIONS_VARIABLE, "").strip()
    listed = os.environ.get(ARCHITECTURES_VARIABLE, "").replace(" ", "")
    if operations not in ("", *OPERATIONS):
        raise BuildError(
            f"{OPERATIONS_VARIABLE}={operations} is not supported: give one of {', '.join(OPERATIONS)}."
        )
    if listed and not re.fullmatch(r"\d+(,\d+)*", listed):
        raise BuildError(
            f"{ARCHITECTURES_VARIABLE}={listed} is invalid: give compute capabilities without points, such as 80,90."
        )
    if operations == "CPU":
        return _for_the_cpu(f"{OPERATIONS_VARIABLE}=CPU is set; unset it for the default")
    asked = f"{OPERATIONS_VARIABLE}={operations}" if operations else ""
    asked = asked or (f"{ARCHITECTURES_VARIABLE}={listed}" if listed else "")
    if cuda is None:
        if asked:
            raise BuildError(
                f"{asked} needs PyTorch's CUDA build, and torch {torch} is another: install that, or unset the variable."
            )
        return _for_the_cpu(f"torch {torch} is not PyTorch's CUDA build")
    architectures = listed or ("" if operations else ",".join(compute_capabilities()))
    if not architectures and not asked:
        return _for_the_cpu(
            f"nvidia-smi finds no GPU here; {OPERATIONS_VARIABLE}=NCCL builds for all GPUs that nvcc knows, and "
            f"{ARCHITECTURES_VARIABLE}=80,90 for those of compute capability 8.0 and 9.0"
        )
    home, major = find_toolkit(cuda), cuda.partition(".")[0]
    if home is None:
        missing = (
            f"nvcc of CUDA {major}, which torch {torch} is built for, was not found on PATH, in CUDA_HOME, in /usr/local/cuda or "
            "in site-packages/nvidia"
        )
        if asked:
            raise BuildError(f"{asked}: {missing}; install that toolkit, or unset the variable.")
        return _for_the_cpu(f"{missing}; install that toolkit for operations on GPUs")
    gpus = f"compute capability {architectures}" if architectures else "all that nvcc knows"
    kind = operations or "NCCL"
    how = "with NCCL" if kind == "NCCL" else "through host memory"
    return GpuOperations(
        kind,
        str(home),
        architectures or None,
        f"operations on GPUs {how} ({gpus}), compiled by the CUDA toolkit in {home}; {OPERATIONS_VARIABLE}=CPU leaves them out",
    )


def _for_the_cpu(reason: str) -> GpuOperations:
    return GpuOperations(None, None, None, f"no operations on GPUs, since {reason}")


def compute_capabilities() -> list[str]:
    """The different compute capabilities of the GPUs of this machine, as numbers without a point."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    versions = re.findall(r"^\s*(\d+)\.(\d+)\s*$", _answer(command), re.MULTILINE)
    return [str(number) for number in sorted({int(major + minor) for major, minor in versions})]


def find_toolkit(cuda: str) -> Path | None:
    """The folder of the first CUDA toolkit of the major version of ``cuda``, or None."""
    major = cuda.partition(".")[0]
    for nvcc in _nvccs(major):
        release = re.search(r"release (\d+)\.", _answer([str(nvcc), "--version"]))
        if release and release[1] == major:
            home = _home_of(nvcc)
            if (home / "bin" / "nvcc").exists():
                return home
    return None


def _nvccs(major: str) -> Iterator[Path]:
    """Paths of nvcc: on ``PATH`` (maybe a link or a wrapper script), in ``CUDA_HOME``, of the system, and from pip's wheels."""
    on_path = shutil.which("nvcc")
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    homes.append(SYSTEM_TOOLKIT)
    homes += [
        folder / "nvidia" / wheel.format(major=major) for folder in _site_packages() for wheel in NVCC_WHEELS
    ]
    yield from [] if on_path is None else [Path(on_path)]
    yield from (nvcc for home in homes if os.access(nvcc := home / "bin" / "nvcc", os.X_OK))


def _home_of(nvcc: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.touch()
        # The nvcc on PATH may be a link or a wrapper script. Only a dry run tells the folder that it compiles with.
        dry_run = _answer([str(nvcc), "--dryrun", "-c", str(source)], folder)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    return (Path(top[1].strip()) if top else nvcc.resolve().parent.parent).resolve()


def _answer(command: list[str], folder: str | None = None) -> str:
    """The output of a program; empty if it cannot be run."""
    run = run_briefly(command, SECONDS, folder=folder)
    return "" if run is None else run.stdout + run.stderr


def run_briefly(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> subprocess.CompletedProcess[str] | None:
    """Runs a program for at most ``seconds`` seconds; returns None if it is missing or takes longer."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def arrange_toolkit(home: Path, folder: Path) -> Path:
    """A toolkit with the folders and names that CMake and nvcc need: ``home``, or links to it in ``folder``.

    pip's wheels have no ``lib64`` and no ``libcudart.so``, and those of CUDA 12 have a folder for each part.
    """
    if (home / "lib64").exists():
        return home
    for name in ("bin", "include", "lib64"):
        (folder / name).mkdir(parents=True)
    for path in (home / "bin").iterdir():
        # nvcc finds its other files beside itself, and follows links: so it is copied.
        shutil.copy(path, folder / "bin") if path.name.startswith("nvcc") else _link(path, folder / "bin")
    for part in (home, *(home.parent / wheel for wheel in TOOLKIT_WHEELS)):
        for source, to in (("include", "include"), ("lib", "lib64")):
            for path in sorted((part / source).glob("*")):
                _link(path, folder / to)
                if version := re.fullmatch(r"(.+\.so)\.\d+", path.name):
                    _link(path, folder / to, version[1])
    (folder / "lib").symlink_to("lib64")
    (folder / "nvvm").symlink_to(home / "nvvm")
    return folder


def _link(path: Path, folder: Path, name: str | None = None) -> None:
    place = folder / (name or path.name)
    if not place.is_symlink():
        place.symlink_to(path)


def find_nccl() -> tuple[Path, Path]:
    """The header folder and the shared library of NCCL: beside PyTorch, in ``NCCL_HOME``, in this environment, or of the system.

    The wheel for PyTorch's CUDA build has ``libnccl.so.2`` and no ``libnccl.so`` for the linker, so the caller makes that link.
    """
    homes = [folder / "nvidia" / "nccl" for folder in _site_packages()]
    homes += [Path(home) for home in (os.environ.get("NCCL_HOME"), sys.prefix) if home]
    places = [
        (home / "include", home / library / "libnccl.so.2") for home in homes for library in ("lib", "lib64")
    ]
    ldconfig = shutil.which(
        "ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    )
    known = _answer([ldconfig, "-p"]) if ldconfig else ""
    places += [(Path("/usr/include"), Path(path)) for path in re.findall(r"libnccl\.so\.2 .*=> (.+)", known)]
    for include, library in places:
        if library.is_file() and (include / "nccl.h").is_file():
            return include, library
    raise BuildError(
        f"NCCL's header and library were not found in {homes[0]}, where PyTorch's CUDA wheels put them, in NCCL_HOME or on the "
        f"system: reinstall torch, set NCCL_HOME, or build without NCCL by {OPERATIONS_VARIABLE}=CPU."
    )


def _site_packages() -> list[Path]:
    """Folders of installed packages, each once: of PyTorch (maybe the system's), of this environment, and of the user."""
    spec = importlib.util.find_spec("torch")
    folders = [Path(spec.origin).parent.parent] if spec is not None and spec.origin is not None else []
    folders += [Path(sysconfig.get_path(name)) for name in ("platlib", "purelib")]
    folders += [Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys(folders))
