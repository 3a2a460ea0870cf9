"""Tools to run a model for measurements: without lasting effects, and under the same conditions each time."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hvd_ckpt.utils.random_sources import GENERATORS, global_sources, source_of
from hvd_ckpt.utils.torch_private import TorchDispatchMode, identity_of

_thread = threading.local()


def is_undisturbed() -> bool:
    """Whether this thread is inside :func:`undisturbed`, where nothing may communicate since other ranks take no part."""
    return bool(getattr(_thread, "undisturbed", False))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context in which modules of this thread do not communicate with other ranks, see :func:`is_undisturbed`."""
    before = is_undisturbed()
    _thread.undisturbed = True
    try:
        yield
    finally:
        _thread.undisturbed = before


def now(device: torch.device) -> float:
    """The time in seconds, after the device has completed its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A context without Python's garbage collection, which would disturb timings."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context in which the model can be trained, and after which it is unchanged.

    Stand-ins replace the parameters. They share the memory of the parameters and have gradients of their own, so hooks on the
    parameters (of an optimizer that reduces gradients over ranks) do not run. At the end, the following are restored: parameters
    that :func:`noting_written` has found, buffers, attributes of modules, and the random states of PyTorch, Python, NumPy and
    generators of modules. Synchronized batch norms do not communicate.
    """
    # Gradient hooks belong to the node that accumulates the gradient of one tensor. A new nn.Parameter over the same memory has a
    # node of its own, without hooks. A tied parameter gets one stand-in, which replaces it in all its modules.
    twins: dict[int, nn.Parameter] = {}
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    devices = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as restored, silent(), torch.random.fork_rng(devices=devices):
        for source in global_sources():
            restored.callback(source.restore)
        for module in model.modules():
            restored.callback(_restoring(module))
            for name in _written.get(module, ()):
                restored.callback(_restoring_contents(module._parameters[name]))
        try:
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
                            # As from the second step of a training on: gradients exist
                            # before the step, and their bytes are in no measured peak.
                            twin.grad = torch.zeros_like(twin)
                        twins[id(parameter)] = twin
                    originals.append((module, name, parameter))
                    setattr(
                        module, name, twins[id(parameter)]
                    )  # a recurrent module keeps a list of them, too
            yield
        finally:
            for module, name, parameter in originals:
                setattr(module, name, parameter)


_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Names of the parameters that a forward pass writes, by module."""


@contextlib.contextmanager
def noting_written(model: nn.Module) -> Iterator[None]:
    """A context that notes the parameters that a forward pass writes, as an embedding with ``max_norm`` does, and restores them."""
    places = {
        identity_of(parameter.untyped_storage()): (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.layout is torch.strided
    }
    with contextlib.ExitStack() as restored, _Writes(places, restored):
        yield


class _Writes(TorchDispatchMode):
    """Mode that copies parameters before an operator writes them.

    Args:
        places: module, name and parameter, by memory.
        restored: gets the functions that restore them.
    """

    def __init__(
        self, places: dict[int, tuple[nn.Module, str, nn.Parameter]], restored: contextlib.ExitStack
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._restored = places, restored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    for tensor in value if isinstance(value, (list, tuple)) else [value]:
                        self._copy(tensor)
        return func(*args, **kwargs)

    def _copy(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        # Removed, as only the contents before the first write are to be restored.
        place = self._places.pop(identity_of(tensor.untyped_storage()), None)
        if place is not None:
            module, name, parameter = place
            self._restored.callback(_restoring_contents(parameter))
            _written.setdefault(module, set()).add(name)


def _restoring(module: nn.Module) -> Callable[[], None]:
    """A function that restores what a module has now: its members, its attributes and the contents of both but of parameters."""
    spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
    own: dict[str, Any] = {}
    buffers: dict[str, Any]
    if isinstance(module, torch.jit.ScriptModule):  # its buffers keep their places
        buffers = dict(module.named_buffers(recurse=False))
    else:
        own = {name: value for name, value in vars(module).items() if _is_own(name) or name == "training"}
        buffers = dict(module._buffers)
        members: tuple[Any, ...] = (module._buffers, module._parameters, module._modules)
        spaces += [(space, dict(space)) for space in members]
    unsaved = set(module._non_persistent_buffers_set)
    contents = [_restoring_contents(value) for value in (*own.values(), *buffers.values())]

    def restore() -> None:
        attributes = vars(module)
        for name in [name for name in attributes if name not in own and _is_own(name)] if own else ():
            del attributes[name]
        attributes.update(own)
        for space, values in spaces:  # cleared first, for the order of state_dict()
            space.clear()
            space.update(values)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(unsaved)
        for put_back in contents:
            put_back()

    return restore


_MODULE = frozenset(vars(nn.Module()))


def _is_own(name: str) -> bool:
    """Whether an attribute belongs to the module itself, and not to PyTorch or to a checkpoint policy."""
    return name not in _MODULE and not name.startswith("_hvd_ckpt")


def _is_resized(value: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor has been resized, or given other data, since ``data`` was its data."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return value.dtype is not data.dtype or value.device != data.device or not value.is_set_to(data)


def _restoring_contents(value: Any) -> Callable[[], None]:
    """A function that restores the current contents of a tensor, a container or a generator."""
    if isinstance(value, torch.Tensor):
        if is_lazy(value) or value.device.type == "meta" or value.is_inference():
            return lambda: None
        data, copy = value.detach(), value.detach().clone()

        def put_back() -> None:
            with torch.no_grad():
                if _is_resized(value, data):
                    value.data = data
                # Written only if it has changed: a copy raises the tensor's version, which a graph that has saved it would refuse.
                if value.layout is not torch.strided or not torch.equal(value.detach(), copy):
                    value.detach().copy_(copy)

        return put_back
    if isinstance(value, GENERATORS):
        return source_of(value).restore
    if type(value) is list:
        return functools.partial(value.__setitem__, slice(None), list(value))
    if type(value) in (dict, set):
        copied = value.copy()

        def refill() -> None:
            value.clear()
            value.update(copied)

        return refill
    return lambda: None
