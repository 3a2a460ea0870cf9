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
            return self._moved(func, name, args, kwargs)
        elif name == "is_pinned":
            return simulation.memory(args[0]).kind == "pinned"
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

    def _moved(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        options = dict(kwargs)
        flags = [one for one in rest if isinstance(one, bool)]
        options.update(zip(("non_blocking", "copy"), flags))
        for one in rest:
            if isinstance(one, torch.dtype):
                options["dtype"] = one
            elif isinstance(one, (str, torch.device, int)) and not isinstance(one, bool):
                options["device"] = one
            elif isinstance(one, torch.Tensor):
                where = DEVICE if self._simulation.is_on_device(one) else one.device
                options |= {"dtype": one.dtype, "device": where}
        if name != "to":
            options["device"] = "cpu" if name == "cpu" else DEVICE
        device = options.pop("device", None)
        if device is not None and torch.device(device).type != "meta":
            device = torch.device(device)
            if (device.type == "cuda") != self._simulation.is_on_device(tensor):
                non_blocking = bool(options.get("non_blocking"))
                kind = "device" if device.type == "cuda" else "pinned" if non_blocking else "pageable"
                return self._simulation.copied(tensor, kind, options.get("dtype"), non_blocking)
            device = None
        if device is not None:
            options["device"] = device
        return torch.Tensor.to(tensor, **options) if options else tensor


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
