"""A region: a checkpointed function, the modules and tensors that it can reach, and which of its calls is a recomputation.

A checkpointed function is often not a module but something around one: a bound method, a lambda, a
``partial``, a list of layers. What a recomputation must protect (the running statistics of batch norm) and
what needs gradients (the parameters) is found by looking into those, without running them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hvd_ckpt.batchnorm.deferred import RunningStatistics
from hvd_ckpt.frames import Frame
from hvd_ckpt.spans import span

# How many functions and containers may lie between the callable and a module: enough for a lambda around a
# partial of a bound method over a list of modules. Containers longer than the second limit hold data, not
# layers.
_MAX_DEPTH = 6
_MAX_ITEMS = 2000


@dataclass
class Reach:
    """What was found: modules with their submodules, each once and in a fixed order, and tensors that are held
    directly."""

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def requires_grad(self) -> bool:
        """Whether any parameter or tensor found here wants a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors) or any(
            parameter is not None and parameter.requires_grad
            for module in self.modules
            for parameter in module._parameters.values()
        )


def reach(*roots: Any) -> Reach:
    """Modules and tensors that ``roots`` hold: as themselves, in containers, closures, partials, bound
    methods, default arguments, attributes of plain objects, and globals that a function's own code names.

    A plain object met inside another plain object is not opened: a method of a trainer leads to the trainer's
    model, not through its optimizer and its loggers into the rest of the program.
    """
    found = Reach()
    seen: set[int] = set()
    for root in roots:
        _visit(root, found, seen, _MAX_DEPTH, open_objects=True)
    return found


def _visit(value: Any, found: Reach, seen: set[int], depth: int, open_objects: bool) -> None:
    if value is None or isinstance(value, (str, bytes, int, float, complex)) or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        found.tensors.append(value)
        return
    if isinstance(value, nn.Module):
        _add_module(value, found, seen)
        return
    if depth == 0:
        return
    held = _held_by(value)
    if held is None:
        if not open_objects:
            return
        held = list(getattr(value, "__dict__", {}).values())
        open_objects = False
    seen.add(id(value))
    for item in held:
        _visit(item, found, seen, depth - 1, open_objects)


def _add_module(root: nn.Module, found: Reach, seen: set[int]) -> None:
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.modules.append(module)
        pending.extend(child for child in reversed(list(module._modules.values())) if child is not None)


def _held_by(value: Any) -> list[Any] | None:
    """The values that a container or a function holds; None for a plain object."""
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value) if len(value) <= _MAX_ITEMS else []
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
        # Functions of other files are not followed: they lead into the libraries that the program imports.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            held.append(value)
    return held


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


class Region:
    """One checkpointed call of ``function``, which can reach what ``found`` lists.

    PyTorch's checkpoint variants and :class:`CheckpointFunction` call a function once in the forward pass and again for
    the backward pass, so wrapping it is enough to know which run is which: the first call is the first pass.
    """

    def __init__(self, function: Callable[..., Any], found: Reach) -> None:
        self.function = function
        self._frame = Frame()
        self._statistics = RunningStatistics(found.modules)
        self._started = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Even a first pass that is still running counts as started: a function that computes gradients inside
        # itself is recomputed in the middle of it.
        if self._started:
            with (
                span("recompute", self._title),
                self._frame.enter(recomputing=True),
                self._statistics.recomputation(),
            ):
                return self.function(*args, **kwargs)
        self._started = True
        with self._frame.enter(recomputing=False), self._statistics.first_pass():
            return self.function(*args, **kwargs)

    def _title(self) -> str:
        """What is recomputed, for a trace: a segment's own words, or the name of the function or module's class."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__self__", function)
        if isinstance(function, nn.Module):
            return f"recompute {type(function).__name__}"
        return f"recompute {getattr(function, '__qualname__', None) or function}"
