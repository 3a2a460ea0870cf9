"""What a build of Horovod finds of CUDA: GPUs, a toolkit that fits PyTorch, NCCL; programs of a few lines stand in for NVIDIA's."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from commands import add_program

from hvd_ckpt.app.install import cuda, recipe
from hvd_ckpt.app.install.prerequisites import BuildError

pytestmark = pytest.mark.launch

CUDA_13 = {"__version__": "2.13.0+cu130", "cuda": "13.0"}
CPU = {"__version__": "2.13.0+cpu", "cuda": None}
OPERATIONS, ARCHITECTURES = cuda.OPERATIONS_VARIABLE, cuda.ARCHITECTURES_VARIABLE
SHELL_PATH = "/usr/bin:/bin"


def add_toolkit(home: Path, release: str = "13.0") -> Path:
    """A folder of a toolkit, whose nvcc tells its release and where it is; returns nvcc."""
    dry_run = f'echo "#\\$ TOP={home}/bin/.." >&2'
    said = f'echo "Cuda compilation tools, release {release}, V{release}.88"'
    return add_program(home / "bin" / "nvcc", f'[ "$1" = --version ] && {said} || {dry_run}')


class Machine:
    """A machine without CUDA, but for what a test adds: programs on ``PATH``, and packages beside PyTorch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.folder, self.bin, self.packages = folder, folder / "bin", folder / "site-packages"
        monkeypatch.setattr(cuda, "_site_packages", lambda: [self.packages])
        monkeypatch.setattr(cuda, "SYSTEM_TOOLKIT", folder / "usr" / "local" / "cuda")
        monkeypatch.setattr(cuda.sys, "prefix", str(folder / "no environment"))
        monkeypatch.setattr(recipe.runpy, "run_path", lambda path: CUDA_13)
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{SHELL_PATH}")
        for name in ("CUDA_HOME", "CUDA_PATH", "NCCL_HOME", OPERATIONS, ARCHITECTURES):
            monkeypatch.delenv(name, raising=False)

    def add_gpus(self, *capabilities: str) -> None:
        lines = "\\n".join(capabilities)
        add_program(self.bin / "nvidia-smi", f"printf '{lines}\\n'")

    def add_nccl(self, home: Path) -> None:
        for name in ("include/nccl.h", "lib/libnccl.so.2"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("operations", ["NCCL", "HOST"])
def test_a_build_is_for_the_gpus_at_hand(machine: Machine, operations: str) -> None:
    """One that goes through host memory has CUDA, and none of the operations of NCCL."""
    machine.add_gpus("9.0", "8.0", "9.0", "[N/A]", "12.0")
    home, nccl = machine.packages / "nvidia" / "cu13", machine.packages / "nvidia" / "nccl"
    add_toolkit(home)
    (home / "lib64").mkdir()
    machine.add_nccl(nccl)
    if operations == "HOST":
        machine.patch.setenv(OPERATIONS, operations)
        machine.patch.setenv(ARCHITECTURES, "80,90,120")
    target = recipe.detect_target()
    assert (target.gpu.kind, target.gpu.architectures) == (operations, "80,90,120")
    assert target.gpu.home == str(home)
    assert "80,90,120" in target.gpu.described and f"mpi-gloo-{operations.lower()}" in target.key
    assert "\n" not in target.gpu.described
    (folder := machine.folder / "build").mkdir()
    environment = recipe.build_environment(target, folder)
    assert environment["HOROVOD_CUDA_HOME"] == environment["CUDA_HOME"] == str(home)
    assert environment[ARCHITECTURES] == "80,90,120"
    assert environment[OPERATIONS] == ("NCCL" if operations == "NCCL" else "")
    if operations == "HOST":
        assert "HOROVOD_NCCL_LIB" not in environment
        return
    assert Path(environment["HOROVOD_NCCL_INCLUDE"], "nccl.h").is_file()
    library = Path(environment["HOROVOD_NCCL_LIB"], "libnccl.so")
    assert library.resolve() == nccl / "lib" / "libnccl.so.2"


def test_without_a_gpu_or_nvcc_a_build_is_for_the_cpu_unless_it_is_asked_for(machine: Machine) -> None:
    add_toolkit(cuda.SYSTEM_TOOLKIT)
    for variable, value, kind, architectures in (
        (OPERATIONS, "", None, None),
        (OPERATIONS, "CPU", None, None),
        (OPERATIONS, "NCCL", "NCCL", None),
        (OPERATIONS, "HOST", "HOST", None),
        (ARCHITECTURES, "80, 90", "NCCL", "80,90"),
    ):
        with machine.patch.context() as patch:
            patch.setenv(variable, value)
            gpu = recipe.detect_target().gpu
        assert (gpu.kind, gpu.architectures) == (kind, architectures)
        assert OPERATIONS in gpu.described  # the way to another build
    machine.patch.setattr(cuda, "SYSTEM_TOOLKIT", machine.folder / "nothing")
    machine.add_gpus("9.0")
    gpu = recipe.detect_target().gpu
    assert gpu.kind is None and "nvcc of CUDA 13" in gpu.described


@pytest.mark.parametrize(
    ("torch", "variable", "value", "message"),
    [
        (CUDA_13, OPERATIONS, "MPI", "HOROVOD_GPU_OPERATIONS=MPI"),
        (CUDA_13, ARCHITECTURES, "9.0", "HOROVOD_BUILD_CUDA_CC_LIST=9.0"),
        (CUDA_13, OPERATIONS, "NCCL", "HOROVOD_GPU_OPERATIONS=NCCL.*nvcc of CUDA 13"),
        (CPU, ARCHITECTURES, "90", r"HOROVOD_BUILD_CUDA_CC_LIST=90.*2\.13\.0\+cpu"),
    ],
)
def test_what_cannot_be_built_is_refused_if_it_is_asked_for(
    machine: Machine, torch: dict[str, Any], variable: str, value: str, message: str
) -> None:
    machine.add_gpus("9.0")
    if torch is CPU:
        add_toolkit(machine.packages / "nvidia" / "cu13")
    machine.patch.setattr(recipe.runpy, "run_path", lambda path: torch)
    assert recipe.detect_target().gpu.kind is None
    machine.patch.setenv(variable, value)
    with pytest.raises(BuildError, match=message):
        recipe.detect_target()


def test_a_toolkit_is_of_pytorchs_major_version(machine: Machine) -> None:
    """The first of those on PATH (perhaps a script that calls nvcc), in CUDA_HOME, on the system and in pip's wheels."""
    homes = {
        "13.2": machine.packages / "nvidia" / "cu13",
        "12.9": machine.packages / "nvidia" / "cuda_nvcc",
        "11.1": cuda.SYSTEM_TOOLKIT,
        "14.0": machine.folder / "home",
    }
    for release, home in homes.items():
        add_toolkit(home, f"{release[:2]}.0")
    on_path = machine.folder / "cuda 12"
    add_program(machine.bin / "nvcc", f'exec "{add_toolkit(on_path, "12.8")}" "$@"')
    machine.patch.setenv("CUDA_HOME", str(homes["14.0"]))
    found = {release: cuda.find_toolkit(release) for release in (*homes, "15.0")}
    assert found == {**homes, "12.9": on_path, "15.0": None}
    (machine.bin / "nvcc").unlink()
    assert cuda.find_toolkit("12.6") == homes["12.9"]


def test_the_parts_of_wheels_are_put_together(machine: Machine) -> None:
    """CUDA 12 has a wheel for each part, and none has the names and folders that CMake and the linker look for."""
    nvidia = machine.packages / "nvidia"
    add_toolkit(nvidia / "cuda_nvcc", "12.8")
    for name in ("cuda_nvcc/nvvm/bin/cicc", "cuda_nvcc/bin/ptxas", "cuda_nvcc/include/fatbinary_section.h",
                 "cuda_runtime/include/cuda_runtime.h", "cuda_runtime/lib/libcudart.so.12"):  # fmt: skip
        (nvidia / name).parent.mkdir(parents=True, exist_ok=True)
        (nvidia / name).touch()
    home = cuda.arrange_toolkit(nvidia / "cuda_nvcc", machine.folder / "toolkit")
    for name in ("bin/ptxas", "nvvm/bin/cicc", "include/cuda_runtime.h", "include/fatbinary_section.h",
                 "lib64/libcudart.so", "lib/libcudart.so.12"):  # fmt: skip
        assert (home / name).is_file(), name
    assert not (home / "bin" / "nvcc").is_symlink()
    whole = machine.folder / "whole"
    (whole / "lib64").mkdir(parents=True)
    assert cuda.arrange_toolkit(whole, machine.folder / "other") == whole


def test_nccl_is_found_beside_pytorch_first(machine: Machine) -> None:
    beside, home = machine.packages / "nvidia" / "nccl", machine.folder / "nccl"
    with pytest.raises(BuildError, match="NCCL_HOME"):
        cuda.find_nccl()
    machine.add_nccl(home)
    machine.patch.setenv("NCCL_HOME", str(home))
    assert cuda.find_nccl() == (home / "include", home / "lib" / "libnccl.so.2")
    machine.add_nccl(beside)
    assert cuda.find_nccl() == (beside / "include", beside / "lib" / "libnccl.so.2")


def test_packages_are_those_beside_pytorch_and_of_the_environment() -> None:
    import torch

    folders = cuda._site_packages()
    assert folders[0] == Path(torch.__file__).parents[1]
    assert Path(sysconfig.get_path("platlib")) in folders
    assert len(set(folders)) == len(folders)
