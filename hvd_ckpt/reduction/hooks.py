"""Where autograd tells the reducer about a gradient.

Two hooks per parameter: one before a gradient is accumulated (it also runs for ``torch.autograd.grad``, which accumulates
nothing), one after. They hold the reducer weakly, since they live as long as the parameters; and only the newest reducer
counts a parameter's gradients, since two that did would both launch them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Listener(Protocol):
    """What hears of the gradients of the parameter number ``index``."""

    def before_accumulation(self, index: int) -> None: ...

    def after_accumulation(self, index: int) -> None: ...

    def is_shared(self, index: int) -> None: ...


_newest: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to the hooks that count it


class GradientHooks:
    """The hooks of one listener on its parameters.

    Args:
        listener: what is told; held weakly.
        parameters: by index.
        departed: the indices for which ``before_accumulation`` is called, kept by the listener.
    """

    def __init__(self, listener: Listener, parameters: Sequence[torch.Tensor], departed: Set[int]) -> None:
        self._listener = weakref.ref(listener)
        self._departed = departed
        self._parameters = parameters
        self._handles: dict[int, list[Any]] = {}
        self._waiting = list(range(len(parameters)))

    def expect(self, index: int) -> None:
        """The parameter number ``index`` has been added to the sequence."""
        self._waiting.append(index)

    def attach(self) -> None:
        """Hooks the parameters that have no hooks yet; PyTorch refuses frozen ones, so these wait to be unfrozen."""
        if not self._waiting:
            return
        frozen = []
        for index in self._waiting:
            parameter = self._parameters[index]
            if not parameter.requires_grad:
                frozen.append(index)
                continue
            other = _newest.get(parameter)
            if other is not None and other() is not None:
                # Both may synchronize after one backward pass: neither may have the gradient in flight by then.
                other().release(parameter)
                self._tell_shared(index)
            _newest[parameter] = weakref.ref(self)
            self._handles[index] = [
                parameter.register_hook(_before(self._listener, index, self._departed)),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(_after(self._listener, index)),  # type: ignore[no-untyped-call]
            ]
        self._waiting = frozen

    def release(self, parameter: torch.Tensor) -> None:
        """Removes the hooks of a parameter that another listener counts from now on."""
        for index in [index for index in self._handles if self._parameters[index] is parameter]:
            for handle in self._handles.pop(index):
                handle.remove()
            self._tell_shared(index)

    def _tell_shared(self, index: int) -> None:
        hears = self._listener()
        if hears is not None:
            hears.is_shared(index)


def _before(
    listener: weakref.ref[Listener], index: int, departed: Set[int]
) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        if index in departed:  # all but late gradients end here
            hears = listener()
            if hears is not None:
                hears.before_accumulation(index)

    return hook


def _after(listener: weakref.ref[Listener], index: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hears = listener()
        if hears is not None:
            hears.after_accumulation(index)

    return hook
