"""Tensors in nested arguments and results, and the facts about torch functions that a tape needs."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hvd_ckpt.utils.torch_private import OpOverload, OpOverloadPacket

_STATISTICS = {"batch_norm", "cudnn_batch_norm", "instance_norm", "miopen_batch_norm", "native_batch_norm"}
"""Functions that update running statistics past the version counters. The result does not depend on those that are updated."""

_attributes: Any = Tensor  # whose getters are functions
UNREPEATABLE = {
    _attributes._base.__get__,
    _attributes.data.__get__,
    _attributes.grad.__get__,
    torch.autograd.grad,
    Tensor.set_,
}
"""Functions that a replay cannot repeat: their results depend on state that it does not restore."""

_WRAPPERS: set[Any] = {
    functional.group_norm,
    functional.layer_norm,
    functional.log_softmax,
    functional.relu,
    functional.rms_norm,
    functional.silu,
    functional.softmax,
}
"""Functions in Python that do nothing but call the operator of their name."""

UNTRACKED = {_attributes.data.__set__, _attributes.data.__get__, Tensor.set_}
"""Functions after which their arguments can be changed past the version counters."""


_PLAIN = {bool, float, int, str, type(None)}
_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(...), type, enum.Enum, np.generic, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip


def is_known(value: Any) -> bool:
    """Whether a value is made of tensors, in nested lists, tuples and dicts, and of constants.

    Of other values, nobody knows whether they change (an array, a generator), have tensors, or run code (a function).
    """
    if type(value) in _PLAIN or isinstance(value, (Tensor, _CONSTANTS)):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_known, value))
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    if isinstance(value, slice):
        return all(isinstance(edge, _CONSTANTS) for edge in (value.start, value.stop, value.step))
    return False


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order, with repetitions."""
    found: list[Tensor] = []
    for value in values:
        if type(value) in _PLAIN:  # which saves most checks
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def map_tensors(change: Callable[[Any], Any], kind: type | tuple[type, ...], value: Any) -> Any:
    """``value`` with ``change`` applied to everything of that kind in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [
            item if type(item) in _PLAIN else map_tensors(change, kind, item) for item in value
        ]  # which saves most calls
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {name: map_tensors(change, kind, item) for name, item in value.items()}
    return value


@functools.cache
def call_name(func: Callable[..., Any]) -> str:
    """A name by which a call is recognized: ``linear``, ``add``, ``T.__get__``."""
    name = getattr(func, "__name__", None) or type(func).__name__
    if name == "__get__":
        return f"{getattr(getattr(func, '__self__', None), '__name__', '?')}.__get__"
    return str(name)


@functools.cache
def _overloads(func: Callable[..., Any]) -> tuple[OpOverload, ...]:
    """The overloads of the operator that a torch function calls; empty if no operator has the name of the function."""
    if isinstance(func, OpOverload):
        return (func,)
    packet = func if isinstance(func, OpOverloadPacket) else getattr(torch.ops.aten, call_name(func), None)
    if not isinstance(packet, OpOverloadPacket):
        return ()
    return tuple(getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]


@functools.cache
def is_custom(func: Callable[..., Any]) -> bool:
    """Whether the function is an operator that PyTorch does not define, so that it may run any code."""
    return any(overload.namespace not in ("aten", "prim", "prims") for overload in _overloads(func))


@functools.cache
def draws(func: Callable[..., Any]) -> bool:
    """Whether the function calls an operator of PyTorch that may draw random numbers by its schema."""
    return not is_custom(func) and any(
        torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(func)
    )


@functools.cache
def depends_on_arguments_alone(func: Callable[..., Any]) -> bool:
    """Whether the function calls a single operator of PyTorch that draws no random numbers by its schema.

    Composites in Python and custom operators may do anything.
    """
    overloads = _overloads(func)
    return (
        bool(overloads)
        and (not isinstance(func, FunctionType) or func in _WRAPPERS)
        and not is_custom(func)
        and not draws(func)
    )


@functools.cache
def changes_nothing(func: Callable[..., Any]) -> bool:
    """Whether the function reads an attribute, or calls a single operator of PyTorch that changes no argument but one that is given
    as ``out``."""
    if func in UNTRACKED or _updates_statistics(func):
        return False
    places, inplace = _mutable(func)
    return call_name(func).endswith(".__get__") or (
        depends_on_arguments_alone(func) and inplace is None and all(name == "out" for _, name in places)
    )


def changed_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call changes in place by its schema, or by an argument ``out`` or ``inplace``."""
    places, inplace = _mutable(func)
    changed = [kwargs.get("out")]
    changed += [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    if inplace is not None and (args[inplace] if inplace < len(args) else kwargs.get("inplace")) is True:
        changed += tensors_in(args, kwargs)[:1]
    return tensors_in(changed)


@functools.cache
def _mutable(func: Callable[..., Any]) -> tuple[tuple[tuple[int, str], ...], int | None]:
    """Positions and names of the arguments that a function changes, and the position of its argument ``inplace``."""
    if call_name(func) == "__setitem__":
        return ((0, "self"),), None
    places = {
        # No call has that many positional arguments, so one that is keyword-only is looked up by its name.
        (sys.maxsize if argument.kwarg_only else place, argument.name)
        for overload in _overloads(func)
        for place, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    names = (
        list(inspect.signature(func, follow_wrapped=False).parameters)
        if isinstance(func, FunctionType)
        else []
    )
    return tuple(sorted(places)), names.index("inplace") if "inplace" in names else None


@functools.cache
def _updates_statistics(func: Callable[..., Any]) -> bool:
    """Whether the function updates running statistics in training mode, which its schema may not tell."""
    return call_name(func).partition(".")[0] in _STATISTICS and not is_custom(func)


def statistics_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The running statistics that a call updates, and so does not read."""
    statistics = running_statistics(func, args, kwargs)
    usual = kwargs.get("training", kwargs.get("use_input_stats", func is functional.instance_norm))
    return statistics if statistics and (args[5] if len(args) > 5 else usual) else []


def running_statistics(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The running statistics among the arguments of a call."""
    if not _updates_statistics(func):
        return []
    first = 1 if func in (functional.batch_norm, functional.instance_norm) else 3
    statistics = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [tensor for tensor in statistics if isinstance(tensor, Tensor)]
