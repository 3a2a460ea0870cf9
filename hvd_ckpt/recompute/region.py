"""A region: one checkpointed call, its first pass and its recomputations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from hvd_ckpt.batchnorm.synchronized import synchronized_once
from hvd_ckpt.recompute.containers import Arguments, flatten
from hvd_ckpt.recompute.environment import Environment
from hvd_ckpt.recompute.reach import Reach
from hvd_ckpt.recompute.state import ForwardState, requires_grad_of, requiring_grad
from hvd_ckpt.recompute.verify import (
    Observation,
    RecomputationMismatch,
    begin_pass,
    naming_modules,
    observe_all,
)
from hvd_ckpt.recompute.watch import Watch
from hvd_ckpt.utils.frames import Frame, aside
from hvd_ckpt.utils.spans import span
from hvd_ckpt.utils.torch_private import (
    StopRecomputationError,
    is_compiled,
    top_saved_tensors_default_hooks,
)

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Options:
    """Options of a recomputation: the keyword arguments of :func:`hvd_ckpt.checkpoint`."""

    use_reentrant: bool | None = False
    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    partition: bool = False

    def __post_init__(self) -> None:
        if self.use_reentrant not in (None, True, False):
            raise TypeError(f"use_reentrant must be True or False, got {self.use_reentrant!r}.")
        if self.use_reentrant and (self.context_fn is not noop_context_fn or self.debug):
            raise ValueError(
                "context_fn and debug need use_reentrant=False: the reentrant variant has neither."
            )
        if self.debug and self.context_fn is not noop_context_fn:
            raise ValueError(
                "debug=True is given with a context_fn, and has one of its own: leave one of them out."
            )

    def contexts(self) -> tuple[Any, Any]:
        """The caller's contexts of the first pass and of the recomputation."""
        given = self.context_fn()
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"context_fn must return two context managers, got {type(given).__name__}.")
        return given[0], given[1]


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
    """One checkpointed call of ``function``, as a function of the tensors among its arguments.

    Both variants of checkpoint call it for the first pass. For each recomputation, the non-reentrant one calls it again, and the
    reentrant one calls :meth:`recompute` with inputs of its own. They save the tensors with the graph, and raise an error if one of
    them was changed in place since. Containers are made again for each recomputation.

    Args:
        function: it can reach what ``reached`` lists.
        args, kwargs: its arguments.
        options: each variant has a first verified pass of its own: one may be right where another is wrong, as they do not run and
            compare the same parts of the function. Without the random state of the first pass, results may differ, and are not
            verified.

    Attributes:
        tensors: the tensors among the arguments, each once.
        arguments: the arguments, to be made again with other tensors.
    """

    # The contexts of both kinds of runs nest in this order, from the outside in:
    #
    #     frame         tells the modules on this thread whether this run is the first pass or a recomputation
    #     state         first pass: notes state; recomputation: restores it for the time of the run
    #     synchronized  Horovod's own SyncBatchNorm reads the statistics of the first pass from the frame
    #     watched       in a verified pass: sees the tensors that autograd saves, to observe or to compare them
    #     environment   recomputation: settings, modes and context variables of the first pass
    #     contexts      those of the caller's context_fn
    #
    # A recomputation usually ends by PyTorch's StopRecomputationError as soon as everything that was saved has been recomputed,
    # so all of them must restore their state when an exception passes.

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reached: Reach,
        options: Options,
    ) -> None:
        self.function = function
        # The first pass gets the caller's own containers, so that the caller sees what the function does to them.
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.arguments = Arguments((args, kwargs))
        self.tensors = self.arguments.tensors
        self._flags = requires_grad_of(self.tensors)
        arguments = {id(tensor) for tensor in self.tensors}
        # PyTorch saves the arguments with the graph and raises an error where one was changed. They must not be restored here.
        others = [tensor for tensor in reached.tensors if id(tensor) not in arguments]
        self._frame = Frame()
        self._contexts = options.contexts()
        # The reentrant variant has no hooks on saved tensors, and is verified by its results.
        self._saves = not options.use_reentrant
        # A compiled module would be compiled once for a pass with hooks on it, and again for the next pass.
        self._names_modules = not any(map(is_compiled, reached.modules))
        self._synchronized = [module for module in reached.modules if isinstance(module, hvd.SyncBatchNorm)]
        # Passes are counted weakly by an object that lives as long as the region does, and not by a lambda of one step.
        owner: Any = reached.modules[0] if reached.modules else _code_of(function)
        self._environment = Environment()
        # With the training flags and the environment: in others the function runs other operations, and is verified anew.
        # With the random state's part: a region that draws other random numbers by design proves nothing about one that must not.
        preserve_random = options.preserve_rng_state
        key = (
            (options.partition, options.context_fn is noop_context_fn, self._saves, preserve_random),
            _codes_of(function),
            self._environment.key,
            *((id(module), module.training) for module in reached.modules),
        )
        title = functools.partial(title_of, function)
        self._passes, self._verification = begin_pass(owner, key, title, may_verify=preserve_random)
        self._is_verified = self._verification is not None
        learn = not self._passes.verified
        self._state = ForwardState(
            self.tensors, reached.modules, reached.generators, others, preserve_random, learn
        )
        self._observed: list[Observation] = []
        self._watched: Watch | None = None  # while the first pass is running
        self._filled_late: list[torch.Tensor] = []  # for what the last operation saves

    def release_first_pass(self) -> None:
        """Releases the arguments: from here on, autograd holds the tensors."""
        self.tensors = self.arguments.tensors = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Runs the function on these tensors: the first pass, and later a recomputation."""
        # A first pass that is still running has begun: a function that computes gradients inside itself is recomputed in the middle
        # of its first pass.
        given, self._given = self._given, None
        if given is not None:
            return self._first_pass(*given)
        with requiring_grad(tensors, self._flags):
            return self.recompute(*self.arguments.rebuild(tensors))

    def _first_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        verified = self._verification is not None
        watched = self._watch(self._observe, is_first=True) if verified else nullcontext()
        with (
            self._frame.enter(recomputing=False),
            self._state.first_pass(),
            synchronized_once(self._synchronized),
            naming_modules() if verified and self._names_modules else nullcontext(),
            watched as watch,
        ):
            with self._contexts[0]:
                result = self.function(*args, **kwargs)
            if watch is not None:
                watch(result)
        # A recomputation finds the lazy tensors initialized. It skips the code that has initialized them, and
        # so saves other tensors.
        if self._state.initialized:
            self._verification = None
        return result

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function again as in the first pass."""
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
            result = self._environment.run(self._in_context, args, kwargs)
            if watch is not None:
                watch(result)
        if verification is not None and (missing := next(left, None)) is not None:
            raise verification.error([f"{what} of the first pass ({missing}) is not there again"])
        return result

    def _in_context(self, *args: Any, **kwargs: Any) -> Any:
        with self._contexts[1]:
            return self.function(*args, **kwargs)

    def _observe(self, tensors: list[tuple[torch.Tensor, nn.Module | None]]) -> None:
        self._observed += observe_all((tensor, module, None) for tensor, module in tensors)

    @contextlib.contextmanager
    def _watch(self, note: Callable[..., None], is_first: bool) -> Iterator[Callable[[Any], None]]:
        """Calls ``note`` with the tensors that autograd saves in the body, or with the tensors in the function's result.

        Yields:
            A function that takes the result.
        """
        # The checkpoint's own hooks are the innermost ones here: the watch wraps them, so that it sees each tensor before they do.
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
