"""Running a model to measure it: without a trace left behind, and the same way each time."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_thread = threading.local()


def is_undisturbed() -> bool:
    """Whether this thread is inside :func:`undisturbed`, where other ranks take no part and nothing may communicate."""
    return bool(getattr(_thread, "undisturbed", False))


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collection, which comes when it likes, stays away from what is timed inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model can be trained inside, and is afterwards as it was.

    Parameters have stand-ins that share their memory, with gradients of their own: hooks on the parameters (an optimizer
    that reduces gradients over ranks) see nothing. Buffers and random states are put back. Synchronized batch norms do not
    communicate.
    """
    twins: dict[int, nn.Parameter] = {}
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    inside = is_undisturbed()
    with torch.random.fork_rng(devices=devices):
        try:
            _thread.undisturbed = True
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is None:
                        continue
                    if is_lazy(parameter):
                        raise ValueError(
                            f"The model has a parameter without a shape yet, '{name}' of a {type(module).__name__}: run the model "
                            "once before planning."
                        )
                    if id(parameter) not in twins:
                        twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                        if parameter.requires_grad:
                            twin.grad = torch.zeros_like(twin)
                        twins[id(parameter)] = twin
                    originals.append((module, name, parameter))
                    setattr(
                        module, name, twins[id(parameter)]
                    )  # a recurrent module keeps a list of them, too
            yield
        finally:
            _thread.undisturbed = inside
            for module, name, parameter in originals:
                setattr(module, name, parameter)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
