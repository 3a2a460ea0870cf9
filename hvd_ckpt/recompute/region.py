"""A region: a checkpointed function with the modules and tensors that it can reach, and its first pass and recomputations.

A checkpointed function is often not a module but an object that contains modules: a bound method, a lambda, a ``partial``, a list
of layers. :func:`reach` looks into such objects, without running them, for the modules whose state a recomputation must restore
(:mod:`.state`) and for the parameters that need gradients.

Forward-mode derivatives and the transforms of :mod:`torch.func` are refused: their tensors belong to the level of the transform,
which has ended when the backward pass recomputes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.autograd import forward_ad

from hvd_ckpt.batchnorm.synchronized import synchronized_once
from hvd_ckpt.recompute.containers import flatten
from hvd_ckpt.recompute.environment import Environment
from hvd_ckpt.recompute.state import ForwardState
from hvd_ckpt.recompute.verify import (
    Observation,
    RecomputationMismatch,
    begin_pass,
    naming_modules,
    observe_all,
)
from hvd_ckpt.recompute.watch import Watch
from hvd_ckpt.utils.frames import Frame, aside
from hvd_ckpt.utils.random_sources import GENERATORS
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.torch_private import (
    StopRecomputationError,
    dual_level,
    in_functorch,
    is_compiled,
    top_saved_tensors_default_hooks,
)

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
    opened: dict[tuple[int, bool], int] = {}
    for root in roots:
        _visit(root, reached, seen, opened, _MAX_DEPTH, open_objects=True)
    return reached


def _visit(
    value: Any,
    reached: Reach,
    seen: set[int],
    opened: dict[tuple[int, bool], int],
    depth: int,
    open_objects: bool,
) -> None:
    if value is None or isinstance(value, (str, bytes, int, float, complex)) or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        reached.tensors.append(value)
        return
    if isinstance(value, nn.Module):
        _add_module(value, reached, seen)
        return
    if isinstance(value, GENERATORS):
        seen.add(id(value))
        reached.generators.append(value)
        return
    # The first way to an object may be so long that it ends before the modules in it, or lead through another object. A shorter or
    # more direct way opens it again.
    if depth <= max(opened.get((id(value), objects), 0) for objects in (True, open_objects)):
        return
    opened[id(value), open_objects] = depth
    held = _held_by(value)
    if held is None:
        if not open_objects:
            return
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = (name for own in slots for name in ([own] if isinstance(own, str) else own))
        held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
        open_objects = False
    for item in held:
        _visit(item, reached, seen, opened, depth - 1, open_objects)


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


_UNFILLED = (
    "the last operation fills a tensor that autograd has saved before, and recomputation stops in between "
    "(early_stop=False lets it run on)"
)


class Chained:
    """A function that runs some layers one after the other: regions of other layers are other regions.

    Attributes:
        layers: the layers, modules or plain functions.
    """

    layers: Sequence[Callable[..., Any]]


class Region:
    """One checkpointed call of ``function``, which can reach what ``reached`` lists.

    PyTorch's checkpoint variants and :class:`CheckpointFunction` call a function once in the forward pass and again for each
    backward pass. So the first call of a region is its first pass, and all later calls are recomputations.

    Args:
        preserve_random: whether to recompute with the random state of the first pass. If not, results may differ, and are not
            verified.
        saves: whether to verify the tensors that autograd saves. If not, the results of the function are verified.
        variant: how the region is recomputed. Each variant has a first training pass of its own: one may be right where another is
            wrong, as they do not run and compare the same parts of the function.
    """

    # The contexts of both kinds of runs nest in this order, from the outside in:
    #
    #     frame         tells the modules on this thread whether this run is the first pass or a recomputation
    #     state         first pass: notes state; recomputation: restores it for the time of the run
    #     synchronized  Horovod's own SyncBatchNorm reads the statistics of the first pass from the frame
    #     watched       in a verified pass: sees the tensors that autograd saves, to observe or to compare them
    #
    # A recomputation usually ends by PyTorch's StopRecomputationError as soon as everything that was saved has been recomputed,
    # so all of them must restore their state when an exception passes.

    def __init__(
        self,
        function: Callable[..., Any],
        reached: Reach,
        preserve_random: bool = True,
        saves: bool = False,
        variant: Hashable = None,
    ) -> None:
        self.function = function
        self.started = False
        self._frame = Frame()
        # A compiled module would be compiled once for a pass with hooks on it, and again for the next pass.
        self._names_modules = not any(map(is_compiled, reached.modules))
        self._synchronized = [module for module in reached.modules if isinstance(module, hvd.SyncBatchNorm)]
        # Passes are counted weakly by an object that lives as long as the region does, and not by a lambda of one step.
        owner: Any = reached.modules[0] if reached.modules else _code_of(function)
        self._environment = Environment()
        self._outside: Environment | None = None  # of the contexts of a recomputation alone, see within()
        # With the training flags and the environment: in others the function runs other operations, and is verified anew.
        # With the random state's part: a region that draws other random numbers by design proves nothing about one that must not.
        key = (
            (variant, saves, preserve_random),
            _codes_of(function),
            self._environment.key,
            *((id(module), module.training) for module in reached.modules),
        )
        title = functools.partial(title_of, function)
        self._passes, self._verification = begin_pass(owner, key, title, may_verify=preserve_random)
        self._is_verified = self._verification is not None
        learn = not self._passes.verified
        self._state = ForwardState(
            reached.modules, reached.generators, reached.tensors, preserve_random, learn
        )
        self._saves = saves
        self._observed: list[Observation] = []
        self._watched: Watch | None = None  # while the first pass is running
        self._filled_late: list[torch.Tensor] = []  # for what the last operation saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A first pass that is still running counts as started: a function that computes gradients inside itself is recomputed in
        # the middle of its first pass.
        if self.started:
            return self._recompute(args, kwargs)
        self.started = True
        verified = self._verification is not None
        watched = self._watch(self._observe, is_first=True) if verified else nullcontext()
        with (
            self._frame.enter(recomputing=False),
            self._state.first_pass(),
            synchronized_once(self._synchronized),
            naming_modules() if verified and self._names_modules else nullcontext(),
            watched as watch,
        ):
            result = self.function(*args, **kwargs)
            if watch is not None:
                watch(result)
        # A recomputation finds the lazy tensors initialized. It skips the code that has initialized them, and
        # so saves other tensors.
        if self._state.initialized:
            self._verification = None
        return result

    def _recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # In the middle of the first pass (a function that computes gradients inside itself), the tensors watched so far are handed
        # on, and what is recomputed is compared with the beginning of the first pass. That proves nothing about its rest.
        is_middle = self._state.note_written()
        if self._watched is not None:
            self._watched.hand_on()
        if self._verification is not None:
            self._verification.is_over = not is_middle
        if self._state.lost:
            raise RecomputationMismatch(
                f"'{self._state.lost[0]}' was written in a forward pass of {title_of(self.function)}, and its values from "
                "before are not known: let the module that has it write it, from the first pass on, or run the module within "
                "hc.without_recomputation()."
            )
        verification = self._verification
        left = iter(self._observed)
        what = "a saved tensor" if self._saves else "a result"

        def compare(tensors: list[tuple[torch.Tensor, nn.Module | None]]) -> None:
            assert verification is not None
            # The tensors are the first of the two in zip(): where they end, no observation has been taken
            # that the next call of this function needs.
            verification.compare([(first, tensor) for (tensor, _), first in zip(tensors, left)], what)

        watched = nullcontext() if verification is None else self._watch(compare, is_first=False)
        with (
            span("recompute", lambda: f"recompute {title_of(self.function)}"),
            self._frame.enter(recomputing=True),
            self._state.recomputation(),
            synchronized_once(self._synchronized),
            watched as watch,
        ):
            if not (self._is_verified or is_middle):
                self._passes.verified = True
            result = self._environment.run(self.function, args, kwargs, self._outside)
            if watch is not None:
                watch(result)
        if verification is not None and (missing := next(left, None)) is not None:
            raise verification.error([f"{what} of the first pass ({missing}) is not there again"])
        return result

    @contextlib.contextmanager
    def within(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """A context of the recomputation alone: ``context``, which adds to the environment of the first pass."""
        self._outside = Environment()
        try:
            with context:
                yield
        finally:
            self._outside = None

    def _observe(self, tensors: list[tuple[torch.Tensor, nn.Module | None]]) -> None:
        self._observed += observe_all((tensor, module, None) for tensor, module in tensors)

    @contextlib.contextmanager
    def _watch(self, note: Callable[..., None], is_first: bool) -> Iterator[Callable[[Any], None]]:
        """Calls ``note`` with the tensors that autograd saves in the body, or with the tensors in the function's result.

        Yields:
            A function that takes the result.
        """
        # With saves, the checkpoint's own hooks are the innermost ones here: the watch wraps them, so that it sees each tensor
        # before they do. The reentrant variant has none, and is verified by its results.
        hooks = top_saved_tensors_default_hooks(False) if self._saves else None
        if hooks is None:
            yield lambda result: None if self._saves else note(_leaves(result))
            return
        watch = Watch(note, is_first)
        if is_first:
            self._watched = watch
        try:
            with torch.autograd.graph.saved_tensors_hooks(functools.partial(watch.pack, hooks[0]), hooks[1]):
                yield lambda result: None
            self._filled_late = watch.filled_late()
        except StopRecomputationError:
            # PyTorch stops a recomputation when the last tensor has been saved. If the last operation fills a saved tensor
            # afterwards (its noise, say), the recomputed tensor is left without its values.
            with aside():
                unfilled = any(self._filled_late)
            if unfilled:
                assert self._verification is not None
                raise self._verification.error([_UNFILLED]) from None
            raise
        finally:
            watch.hand_on()
            if is_first:
                self._watched = None


def _leaves(result: Any) -> list[tuple[torch.Tensor, None]]:
    return [(leaf, None) for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]


def title_of(function: Any) -> str:
    """Name of what is recomputed: the description of a segment, or the name of a function or of the class of a module."""
    if isinstance(function, functools.partial) and isinstance(function.func, FunctionType) and function.args:
        first = function.args[0]  # a module whose forward pass it is, or modules by name
        if isinstance(first, nn.Module) and function.func.__name__ == "forward":
            return type(first).__name__
        if isinstance(first, Mapping):
            return ", ".join(f"'{name}' ({type(module).__name__})" for name, module in first.items())
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__self__", function)
    if isinstance(function, nn.Module):
        return type(function).__name__
    return str(getattr(function, "__qualname__", None) or function)


def _code_of(function: Any) -> Any:
    """An object that is the same in each step, although a loop makes a new function: its code, or the class of the object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _codes_of(function: Any) -> tuple[int, ...]:
    """Numbers of the code of a function and, for a segment of a chain, of each layer, which may be a plain function."""
    while isinstance(function, functools.partial):
        function = function.func
    layers = function.layers if isinstance(function, Chained) else ()
    return id(_code_of(function)), *(id(_code_of(layer)) for layer in layers)
