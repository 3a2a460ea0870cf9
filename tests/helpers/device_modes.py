"""Modes in which CPU tensors stand for tensors on a device, and operations tell a simulation what they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from streams import Simulation

DEVICE = torch.device("cuda", 0)


class Operations(TorchDispatchMode):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._simulation.run(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Tensors say where they are, and functions make them where they are told to."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, simulation = dict(kwargs or {}), self._simulation
        name = getattr(func, "__name__", "")
        if name == "__get__":
            read = func.__self__
            if read is torch.Tensor.is_cuda:
                return simulation.is_on_device(args[0])
            if read is torch.Tensor.device:
                return DEVICE if simulation.is_on_device(args[0]) else func(*args)
        if name in ("tolist", "numpy"):
            simulation.read_by_host(args[0], name)
        elif name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        elif name == "pin_memory":
            return simulation.copied(args[0], "pinned")
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if device is None and not pinned:
            return func(*args, **kwargs)
        device = torch.device("cpu" if device is None else device)
        kind = "device" if device.type == "cuda" else "pinned" if pinned else "pageable"
        if device.type in ("cuda", "cpu"):
            kwargs["device"] = "cpu"
        with simulation.making(kind):
            result = func(*args, **kwargs)
        if device.type != "meta":
            for tensor in tensors_in(result):
                simulation.allocate(tensor, kind)
        if name == "tensor" and kind == "device":
            simulation.note_wait()
        return result

    def _moved(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of ``to()``, ``cpu()`` or ``cuda()``."""
        tensor, *rest = args
        simulation = self._simulation
        if name != "to":
            rest = ["cpu" if name == "cpu" else DEVICE]
        elif rest and isinstance(rest[0], torch.Tensor):
            rest[:1] = [DEVICE if simulation.is_on_device(rest[0]) else rest[0].device, rest[0].dtype]
        copy = options.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **options)
        if device is None or device.type == "meta":
            return torch.Tensor.to(tensor, *rest, copy=copy, **options)
        if (device.type == "cuda") == simulation.is_on_device(tensor):
            return torch.Tensor.to(tensor, dtype or tensor.dtype, copy=copy)
        kind = "device" if device.type == "cuda" else "pinned" if non_blocking else "pageable"
        return simulation.copied(tensor, kind, dtype, non_blocking)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor) and one.numel()]


def identity_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def operands_of(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operation reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    arguments = function._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, values):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors_in(value))
    return reads, writes
