"""The environment of a forward pass, which its recomputation gets back: settings, modes and context variables.

A recomputation runs in the backward pass, after the caller has left the contexts of the first pass, and perhaps on another thread.
So the settings, torch function modes, dispatch modes and context variables of the first pass are noted, and are those of the
recomputation, of a region or of a single call. A mode that has been left is entered again.

Modes that only observe are left as the backward pass has them: a counter of operations counts what runs while it is entered.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

from hvd_ckpt.utils.torch_private import (
    LIBRARIES,
    PRIVATE_OBSERVERS,
    DeviceContext,
    TorchDispatchMode,
    disable_current_modes,
    dispatch_mode_stack,
    function_mode_stack,
    in_mode,
    pop_function_mode,
    push_function_mode,
)

# Modules of modes that belong to a run and not to what it computes: those of this library, selective checkpointing, and observers.
_OF_A_RUN = (
    "hvd_ckpt.planning.", "hvd_ckpt.recompute.", "hvd_ckpt.utils.", "torch.autograd.graph", "torch.distributed.tensor.debug.",
    "torch.utils.checkpoint", "torch.utils.flop_counter", *PRIVATE_OBSERVERS,
)  # fmt: skip


class Modes:
    """The modes and context variables that the calling thread has now.

    Attributes:
        functions, operations: torch function modes and dispatch modes, from the outermost, without those that belong to a run.
        device: the default device, if it was set.
    """

    __slots__ = ("_variables", "device", "functions", "operations")

    def __init__(self) -> None:
        self.functions: tuple[Any, ...] = ()
        self.operations: tuple[Any, ...] = ()
        self.device: torch.device | None = None
        self._variables = copy_context()
        if in_mode():
            stack = function_mode_stack()  # type: ignore[no-untyped-call]
            self.functions = tuple(mode for mode in stack if not _stays(mode))
            self.operations = tuple(mode for mode in dispatch_mode_stack() if not _stays(mode))
            self.device = next(
                (mode.device for mode in reversed(stack) if isinstance(mode, DeviceContext)), None
            )

    @property
    def key(self) -> Hashable:
        """What tells an environment of another kind. Modes and values are often new ones in each step, and of the same kind."""
        return (
            tuple(map(type, self.functions)),
            tuple(map(type, self.operations)),
            self.device,
            frozenset(self._variables),
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Modes)
            and _same(self.functions, other.functions)
            and _same(self.operations, other.operations)
            and self.device == other.device
            and len(self._variables) == len(other._variables)
            and all(
                other._variables.get(variable, self) is value for variable, value in self._variables.items()
            )
        )

    def may_change_results(self) -> bool:
        """Whether there are modes that may compute something else than the operations that are called."""
        return bool(self.functions or self.operations)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)`` with these modes and context variables."""
        # A copy, since a context can be entered once at a time, and what the recomputation sets must not last.
        variables = self._variables.copy()
        if not in_mode() and self.device is None and not self.may_change_results():
            return variables.run(function, *args, **kwargs)
        now = Modes()
        with contextlib.ExitStack() as restore:
            if now.device != self.device:
                restore.enter_context(torch.device("cpu") if self.device is None else self.device)
            if not _same(now.functions, self.functions):
                restore.enter_context(_in_functions(self.functions))
            if not _same(now.operations, self.operations):
                restore.enter_context(_in_operations(self.operations))
            return variables.run(function, *args, **kwargs)


def _stays(mode: Any) -> bool:
    return isinstance(mode, DeviceContext) or any(
        kind.__module__.startswith(_OF_A_RUN) for kind in type(mode).__mro__
    )


def _same(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs))


def _is_handling(mode: Any) -> bool:
    """Whether a torch function mode is handling a call, such as that of ``backward()``: meanwhile it is not on the stack."""
    for innermost in list(sys._current_frames().values()):  # autograd recomputes on its own threads, too
        frame: Any = innermost
        while frame is not None:
            code = frame.f_code
            if code.co_name == "__torch_function__" and frame.f_locals.get(code.co_varnames[0]) is mode:
                return True
            frame = frame.f_back
    return False


def _contains(modes: Sequence[object], mode: object) -> bool:
    return any(other is mode for other in modes)


# In both: a mode that the thread is in already is only moved, since entering it again may begin it anew, as a mode does that clears
# its records then.


@contextlib.contextmanager
def _in_functions(wanted: Sequence[Any]) -> Iterator[None]:
    before = function_mode_stack()  # type: ignore[no-untyped-call]
    devices = [
        mode for mode in before if isinstance(mode, DeviceContext)
    ]  # PyTorch wants it to be the outermost
    staying = [mode for mode in before if _stays(mode) and not isinstance(mode, DeviceContext)]
    for _ in before:
        pop_function_mode()  # type: ignore[no-untyped-call]
    try:
        with contextlib.ExitStack() as entered:
            for mode in (*devices, *wanted, *staying):
                if _contains(before, mode) or _is_handling(mode):
                    push_function_mode(mode)  # type: ignore[no-untyped-call]
                    entered.callback(pop_function_mode)
                else:
                    entered.enter_context(mode)
            yield
    finally:
        for mode in before:
            push_function_mode(mode)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _in_operations(wanted: Sequence[Any]) -> Iterator[None]:
    before = dispatch_mode_stack()
    with disable_current_modes(), contextlib.ExitStack() as entered:
        for mode in (*wanted, *filter(_stays, before)):
            if _contains(before, mode):
                TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
                entered.callback(TorchDispatchMode.__exit__, mode, None, None, None)
            else:
                entered.enter_context(mode)
        yield


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _be_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


_kernels: Any = torch.backends.cuda  # of attention, on every device: each kernel saves other tensors

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    *(
        (getattr(_kernels, f"{name}_sdp_enabled"), getattr(_kernels, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    (_deterministic, _be_deterministic),
    *LIBRARIES,
    *(
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        for kind in ("cpu", "cuda")
    ),
    *(
        (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind))
        for kind in ("cpu", "cuda")
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
"""Functions that read and set the settings; the last of them is autocast's cache of casts."""
_READERS = [get for get, _ in _SETTINGS]


def _read() -> tuple[Any, ...]:
    return tuple([get() for get in _READERS])  # for each dropped call


class Environment:
    """The modes, context variables and settings that the calling thread has now."""

    __slots__ = ("_settings", "modes")

    def __init__(self) -> None:
        self.modes = Modes()
        self._settings = _read()

    @property
    def key(self) -> Hashable:
        """What tells an environment of another kind."""
        return self.modes.key, self._settings

    def is_current(self) -> bool:
        """Whether the calling thread still has them all."""
        return self._settings == _read() and self.modes == Modes()

    @contextlib.contextmanager
    def entered(self, caching: bool = True) -> Iterator[None]:
        """A context with the settings; without the cache of autocast, if it is not ``caching``."""
        before = _read()
        entered = self._settings if caching else (*self._settings[:-1], False)
        # As in torch.autocast: the outermost context of autocast ends with an empty cache.
        torch.autocast_increment_nesting()
        try:
            _change(before, entered)
            yield
        finally:
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
            _change(entered, before)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)`` in this environment."""
        with self.entered():
            return self.modes.run(function, args, kwargs)


def _change(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for (_, change), old, new in zip(_SETTINGS, before, after):
        if new != old:
            change(new)
