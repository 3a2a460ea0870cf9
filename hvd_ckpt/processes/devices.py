"""Devices of the processes of a job: which GPU is whose, and whether Horovod can communicate from it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable

import horovod.torch as hvd
import torch

from hvd_ckpt.processes.grid import current
from hvd_ckpt.utils import run_warnings
from hvd_ckpt.utils.text import BUILD_HOROVOD

LINK_VARIABLE, LINKS = "HVD_CKPT_LINK", ("nccl", "host", "gloo")
NO_GPU_OPERATIONS = "this Horovod is built without operations on GPUs"


def has_gpu_operations() -> bool:
    """Whether Horovod can communicate tensors of GPUs. Without, it waits forever for the first one."""
    return bool(hvd.cuda_built() or hvd.rocm_built())


def message_backend() -> str:
    """The backend of PyTorch that carries a device's tensors between stages and parts: ``"nccl"``, or an empty string for none.

    ``HVD_CKPT_LINK=host`` sends them through the memory of hosts, and ``gloo`` is for tests of this link on CPUs.

    Raises:
        ValueError: the variable has another value.
    """
    chosen = os.environ.get(LINK_VARIABLE, LINKS[0])
    if chosen not in LINKS:
        raise ValueError(f"{LINK_VARIABLE} must be {', '.join(LINKS[:-1])} or {LINKS[-1]}, got {chosen!r}")
    if chosen == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ""
    return chosen if chosen != "host" else ""


def local_device() -> torch.device:
    """The device of this process: its own GPU, which becomes PyTorch's current device, or the CPU on a machine without GPUs.

    All processes of a job on one host take its GPUs in order. (``local_rank()`` counts only those of one pipeline stage.) Without
    NCCL, several processes may share a GPU. A process that sees only one GPU, because the launcher has given each its own, takes
    that one. If Horovod is built without operations on GPUs, the device is the CPU, and process 0 prints this. Call the function
    after ``init()``, and before you build the model.

    Raises:
        RuntimeError: there are more processes on this host than GPUs, and Horovod uses NCCL.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        return torch.device("cpu")
    if not has_gpu_operations():
        if current().number == 0:
            run_warnings.warn(f"training on the CPU, since {NO_GPU_OPERATIONS}: {BUILD_HOROVOD}")
        return torch.device("cpu")
    number = current().local_rank if visible > 1 else 0
    if number >= visible and hvd.nccl_built():
        raise RuntimeError(
            f"process {number} of this host (from 0) has no GPU, since {visible} are visible: start at most {visible} processes on "
            f"a host, or give each a GPU of its own in CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", number % visible)
    torch.cuda.set_device(device)
    return device


def device_named(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: it is neither a CPU nor a CUDA device of this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # refused below, like a device that is not supported
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device '{name}': give cpu, cuda, or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device '{name}': this machine has no such device, see `hvd-ckpt doctor`")
    return device


def use_deterministic_kernels() -> None:
    """Has PyTorch compute with kernels that repeat bit for bit, or raise for an operation without one; before CUDA starts."""
    # cuBLAS reads it when its first handle is made, and PyTorch refuses deterministic products without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def check_devices(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks that Horovod can communicate these tensors; warns where they are on another GPU than PyTorch's current one.

    Raises:
        ValueError: one is on a GPU, and Horovod has no operations on GPUs.
    """
    for name, tensor in named:
        if not tensor.is_cuda:
            continue
        if not has_gpu_operations():
            raise ValueError(
                f"'{name}' is on {tensor.device}, and {NO_GPU_OPERATIONS}: {BUILD_HOROVOD}; or move the model to the CPU"
            )
        device = torch.cuda.current_device()
        if tensor.device.index != device:
            warnings.warn(
                f"'{name}' is on {tensor.device}, and this process's current device is cuda:{device}: call "
                f"torch.cuda.set_device({tensor.device.index}), or hvd_ckpt.local_device(), before the model is built",
                stacklevel=2,
            )
        return


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device. The host does not wait for a copy to a GPU, which comes in the order of its stream."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
