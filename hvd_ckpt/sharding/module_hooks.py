"""Pre- and post-backward hooks of a module: around its inputs, and on the tensors that it returns."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from hvd_ckpt.planning.deferred import DeferredLogits
from hvd_ckpt.planning.policy import is_planned
from hvd_ckpt.recompute.keeper import Plain, plain
from hvd_ckpt.utils.torch_private import (
    DisableTorchFunction,
    pytree,
    top_saved_tensors_default_hooks,
    unsafe_preserve_version_counter,
)


class UnitCall:
    """One use of a unit: from its first module to its last, and the way back through them.

    Attributes:
        left: modules that have not run yet.
        entered: inputs of the first module that require a gradient, and what it was given in their place, while it runs.
    """

    __slots__ = ("entered", "left")

    def __init__(self, modules: int) -> None:
        self.left = list(range(modules))
        self.entered: list[tuple[torch.Tensor, torch.Tensor]] = []


def register_post_backward(
    call: UnitCall, post_backward: Callable[[UnitCall], None], args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """The arguments of the first module, behind an identity whose backward pass comes after all of the unit's.

    Returns:
        The arguments, or None where none requires a gradient.
    """
    with DisableTorchFunction():
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # One that is given twice stays one: attention looks whether query, key and value are the same tensor.
        wanted = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        if not wanted:
            return None
        # One node for all inputs: its backward pass comes once, when the gradients of all of them are there.
        passed = _PostBackward.apply(post_backward, call, *wanted.values())  # type: ignore[no-untyped-call]
        call.entered += zip(wanted.values(), passed)
        by_id = dict(zip(wanted, passed))
        leaves = [by_id.get(id(leaf), leaf) for leaf in leaves]
        given: tuple[Any, Any] = pytree.tree_unflatten(leaves, structure)
    return given


def is_input(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an input as the module was given it."""
    return isinstance(tensor.grad_fn, _PostBackward._backward_cls)


def adopt_changes(call: UnitCall) -> None:
    """The first module has run: where it changed an input in place, the tensor that its caller has gets that history."""
    entered, call.entered = call.entered, []
    for given, tensor in entered:
        with DisableTorchFunction():
            if not is_input(tensor):
                # The change has been counted already: a detached tensor shares the
                # version counter of what it was detached from.
                with unsafe_preserve_version_counter(given):
                    _Changed.apply(given, tensor)  # type: ignore[no-untyped-call]


class _PostBackward(torch.autograd.Function):
    """Identity."""

    @staticmethod
    def forward(
        ctx: Any, post_backward: Callable[[UnitCall], None], call: UnitCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.post_backward, ctx.call = post_backward, call
        # A missing gradient stays None, as without this node; zeros would be accumulated.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # no views: these may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.post_backward(ctx.call)
        return (None, None, *gradients)


class _Changed(torch.autograd.Function):
    """Gives a tensor the history of another one that lies in the same memory."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(given)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0]


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module)
_LONGEST = 64  # a container of more values that a module has is data, no list of losses
_LONGEST_ARGUMENT = 1024  # of caches with some tensors for each layer


def tensors_within(value: Any, longest: float = math.inf, objects: bool = True) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, data classes and other objects, each once; not those inside of modules. Logits that are not
    computed yet are where the gradient of their input comes back to.

    Args:
        longest: containers of more values are not opened.
        objects: whether objects that are neither containers nor data classes are opened.
    """
    seen: set[int] = set()
    open_values = [value]
    while open_values:
        inner = open_values.pop()
        if isinstance(inner, _PLAIN) or id(inner) in seen:
            continue
        seen.add(id(inner))
        if isinstance(inner, torch.Tensor):
            yield inner.hidden if isinstance(inner, DeferredLogits) else inner
            continue
        held = _held_by(inner, objects)
        if len(held) <= longest:
            open_values += held


def _held_by(value: Any, objects: bool) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, part.name, None) for part in dataclasses.fields(value)]
    if callable(value) or not objects:
        return ()
    held = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        held += (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))
    return held


def apart(output: Any, holds: Callable[[torch.Tensor], bool]) -> Any:
    """The output of a unit, with copies of those tensors that the unit's memory holds."""
    with DisableTorchFunction():
        if not any(map(holds, tensors_within(output))):
            return output
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if holds(tensor) else tensor, output
    )


class SavedInPass:
    """Hooks on what autograd saves in the forward pass of a unit's module that uses parameters of its own.

    What it computes with these is no module's output, and may leave in a way that nobody sees. So a backward pass that asks for a
    saved tensor gathers the unit if the tensor lies in its memory. Saved-tensor hooks around it (of a region, of a tape) stay in
    force.
    """

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        """Pre-forward hook of the module."""
        is_kept = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_planned(module)
        name = type(module).__name__
        context: AbstractContextManager[Any] = nullcontext()
        if is_kept and top_saved_tensors_default_hooks(False) is None:
            context = torch.autograd.graph.saved_tensors_hooks(lambda tensor: plain(tensor, name), Plain.get)
        context.__enter__()
        self._entered.append(context)

    def after(self, *_: Any) -> None:
        """Post-forward hook."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


_USUAL = frozenset(nn.Module().__dict__)


def tensors_left_in(module: nn.Module, arguments: Any, since: int) -> Iterator[torch.Tensor]:
    """The results of operations that a call of a module has left elsewhere than in its output.

    They are in attributes of the module and of those inside it, such as a loss that is added to the model's own later, and in its
    arguments, such as keys and values in a cache.

    Args:
        since: the number of autograd's next node when the call began.
    """
    # Most modules have no attributes but those of every module; this runs in each forward pass of a unit. Objects are not opened in
    # attributes, since they may lead to all of a program.
    own = [
        tensors_within(value, _LONGEST, objects=False)
        for inner in module.modules()
        if len(inner.__dict__) != len(_USUAL)
        for name, value in inner.__dict__.items()
        if name not in _USUAL and not isinstance(value, _PLAIN)
    ]
    seen: set[int] = set()
    for tensor in itertools.chain(tensors_within(arguments, _LONGEST_ARGUMENT), *own):
        node = tensor.grad_fn
        # A loss may stay in its attribute for many passes, and a cache has what the other units have left there.
        if node is not None and node._sequence_nr() >= since and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
