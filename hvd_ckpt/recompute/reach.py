"""Modules, tensors and generators that a function can reach, and transforms of :mod:`torch.func` around it.

A checkpointed function is often not a module but an object that contains modules: a bound method, a lambda, a ``partial``, a list
of layers. :func:`reach` looks into such objects, without running them, for the modules whose state a recomputation must restore
(:mod:`.state`) and for the parameters that need gradients.

Forward-mode derivatives and the transforms of :mod:`torch.func` are refused: their tensors belong to the level of the transform,
which has ended when the backward pass recomputes.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from hvd_ckpt.utils.random_sources import GENERATORS
from hvd_ckpt.utils.torch_private import dual_level, in_functorch

# Limit of the functions and containers between the callable and a module: enough for a lambda around a partial of a bound method
# over a list of modules. Containers longer than the second limit hold data and not layers.
_MAX_DEPTH = 6
_MAX_ITEMS = 2000


@dataclass
class Reach:
    """Objects that a function can reach.

    Attributes:
        modules: modules and their submodules, each once, in a fixed order.
        tensors: tensors that no module has.
        generators: generators of random numbers that no module has.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)

    def requires_grad(self) -> bool:
        """Whether any of the parameters and tensors requires a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors) or any(
            parameter is not None and parameter.requires_grad
            for module in self.modules
            for parameter in module._parameters.values()
        )


def reach(*roots: Any) -> Reach:
    """Modules, tensors and generators that ``roots`` are or hold: in containers, closures, partials, bound methods, default
    arguments, attributes of plain objects, and the globals that a function's own code names.

    A plain object inside another plain object is not opened. So a method of a trainer leads to the trainer's model, and not through
    its optimizer and loggers into the rest of the program.
    """
    reached = Reach()
    seen: set[int] = set()
    opened: set[tuple[int, bool]] = set()
    # Level by level, so that the first way to an object is a shortest one. It may lead through a plain object, in which others are
    # not opened. Then a more direct way opens the object again.
    level = [(root, True) for root in roots]
    for depth in range(_MAX_DEPTH, -1, -1):
        following: list[tuple[Any, bool]] = []
        for value, opens in level:
            if value is None or isinstance(value, (str, bytes, int, float, complex)) or id(value) in seen:
                continue
            if isinstance(value, torch.Tensor):
                seen.add(id(value))
                reached.tensors.append(value)
            elif isinstance(value, nn.Module):
                _add_module(value, reached, seen)
            elif isinstance(value, GENERATORS):
                seen.add(id(value))
                reached.generators.append(value)
            elif depth and (id(value), True) not in opened and (id(value), opens) not in opened:
                opened.add((id(value), opens))
                held = _held_by(value)
                if held is not None:
                    following += [(item, opens) for item in held]
                elif opens:
                    following += [(item, False) for item in _attributes(value)]
        level = following
    return reached


def _attributes(value: Any) -> list[Any]:
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = (name for own in slots for name in ([own] if isinstance(own, str) else own))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]


def _add_module(module: nn.Module, reached: Reach, seen: set[int]) -> None:
    if id(module) not in seen:
        seen.add(id(module))
        reached.modules.append(module)
        for child in module._modules.values():
            if child is not None:
                _add_module(child, reached, seen)


def _held_by(value: Any) -> list[Any] | None:
    """The values that a container or a function holds; None for a plain object."""
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return _held_by_function(value)
    if isinstance(value, type) or inspect.ismodule(value):
        return []
    return None


def _held_by_function(function: FunctionType) -> list[Any]:
    held: list[Any] = list(function.__defaults__ or ())
    held.extend((function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable of the enclosing function that is not bound yet
            continue
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        # Functions of other files are not followed, as they lead into the libraries that the program imports.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            held.append(value)
    return held


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def is_transformed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call runs inside a transform of :mod:`torch.func`, or on tensors that carry a forward-mode derivative."""
    if in_functorch() or dual_level() < 0:
        return in_functorch()
    reached = reach(function, args, kwargs)
    parameters = (parameter for module in reached.modules for parameter in module._parameters.values())
    with torch.no_grad():
        return any(
            forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
            for tensor in (*reached.tensors, *parameters)
            if tensor is not None
        )


def refuse_transforms(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError if :func:`is_transformed`; called in a forward pass that would be recomputed."""
    if is_transformed(function, args, kwargs):
        raise RuntimeError(
            "Forward-mode derivatives and the transforms of torch.func (jvp, vmap, grad, ...) cannot pass through a block that is "
            "recomputed, by a plan or a checkpoint: run this forward pass inside `with hc.without_recomputation():`."
        )
