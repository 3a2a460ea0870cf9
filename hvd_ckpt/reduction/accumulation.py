"""Gradient accumulations: the hooks that report them, and how many of them make a gradient ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# A parameter's gradient may arrive in several parts: once per use in a recomputed segment, once per micro-batch. The number of
# accumulations between two synchronizations is learned, and a gradient is ready after as many.


class AccumulationCounts:
    """Learns how many accumulations each of ``n`` gradients takes between two synchronizations.

    A count rises at once; it falls only after two equal lower steps, so that one short step (the last, shorter accumulation
    group of an epoch, say) does not make the next full one late. ``expected`` is a plain list so that the hook which runs once
    per gradient costs two list look-ups.
    """

    def __init__(self, n: int) -> None:
        self.arrived: list[int] = [0] * n
        self.expected: list[int] = [0] * n
        self.last_arrival = [
            0
        ] * n  # position in this step's sequence of accumulations, from 1; 0 without one
        self._lower: list[int] = [-1] * n
        self._clock = 0
        self.learned = False

    def extend(self, n: int) -> None:
        """Adds ``n`` parameters that never arrived."""
        for counts, value in (
            (self.arrived, 0),
            (self.expected, 0),
            (self.last_arrival, 0),
            (self._lower, -1),
        ):
            counts.extend([value] * n)

    def count(self, index: int) -> int:
        """Counts one accumulation; returns how often the parameter has arrived in this step."""
        self._clock += 1
        self.last_arrival[index] = self._clock
        self.arrived[index] += 1
        return self.arrived[index]

    def forget(self, indices: Iterable[int]) -> None:
        """Forgets this step's accumulations of some parameters."""
        for index in indices:
            self.arrived[index] = self.last_arrival[index] = 0
        self._clock *= any(self.arrived)

    def close_step(self, learn: bool = True) -> None:
        """Learns from this step's accumulations (unless told not to) and starts the next step."""
        if learn and self._clock:
            if not self.learned:
                self.expected = list(self.arrived)
                self.learned = True
            elif self.arrived != self.expected:
                for index, (arrived, expected) in enumerate(zip(self.arrived, self.expected)):
                    if arrived < expected and arrived != self._lower[index]:
                        self._lower[index] = arrived
                    else:
                        self.expected[index] = arrived
                        self._lower[index] = -1
            elif max(self._lower) >= 0:
                self._lower = [-1] * len(self._lower)
        self.arrived = [0] * len(self.arrived)
        self.last_arrival = [0] * len(self.last_arrival)
        self._clock = 0

    def state_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The learned counts by the parameters' names (None before the first step), and those of a first lower step."""
        lower = {name: count for name, count in zip(names, self._lower) if count >= 0}
        return {"counts": dict(zip(names, self.expected)) if self.learned else None, "lower_counts": lower}

    def load_state_dict(self, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Loads what was learned; a parameter that the state does not name has never arrived."""
        counts, lower = state["counts"], state["lower_counts"]
        self.learned = counts is not None
        self.expected = [int((counts or {}).get(name, 0)) for name in names]
        self._lower = [int(lower.get(name, -1)) for name in names]


# Two hooks per parameter: one before a gradient is accumulated (it also runs for ``torch.autograd.grad``, which accumulates
# nothing), one after. They hold the reducer weakly, since they live as long as the parameters.
#
# A parameter belongs to the optimizer that was made or synchronized last of those that have it: two that counted its
# gradients would both launch them. Each of the others holds the owner, so that the owner is there on every rank for as long
# as one of them may be stepped: nothing that ranks do together depends on when Python collects an optimizer.


class Listener(Protocol):
    """Receives the gradient events of the parameter number ``index``."""

    def before_accumulation(self, index: int) -> None: ...

    def after_accumulation(self, index: int) -> None: ...

    def interrupt(self) -> None:
        """Another listener begins with parameters of this one: a step that has begun is dropped."""

    def lose(self, indices: Sequence[int]) -> None:
        """Another listener hears of these parameters from now on."""


@dataclass
class _Holders:
    """The hooks that have a parameter, and those of them that it belongs to."""

    owner: weakref.ref[GradientHooks] | None = None
    every: list[weakref.ref[GradientHooks]] = field(default_factory=list)


_holders: Any = WeakTensorKeyDictionary()  # by parameter


def owner_of(parameter: torch.Tensor) -> Any | None:
    """The distributed optimizer that a parameter belongs to, or None."""
    holders = _holders.get(parameter)
    hooks = None if holders is None or holders.owner is None else holders.owner()
    return None if hooks is None else hooks.optimizer()


class GradientHooks:
    """The hooks of one listener on its parameters.

    Args:
        listener: receives the events; held weakly.
        parameters: by index.
        departed: the indices for which ``before_accumulation`` is called, kept by the listener.

    Attributes:
        optimizer: weak reference to the optimizer, once :meth:`begin` has been called.
    """

    def __init__(
        self, listener: Listener, parameters: Sequence[torch.Tensor], departed: Container[int]
    ) -> None:
        self.optimizer: Callable[[], Any] = lambda: None
        self._listener = weakref.ref(listener)
        self._departed = departed
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._handles: dict[int, list[Any]] = {}
        self._waiting: list[int] = []  # own parameters without hooks
        self._owners: dict[int, Any] = {}  # of parameters that belong to another optimizer: that one

    def begin(self, optimizer: Any) -> None:
        """Makes all parameters this optimizer's own."""
        self.optimizer = weakref.ref(optimizer)
        self.add(range(len(self._parameters)))

    def add(self, indices: Iterable[int]) -> None:
        """Makes the parameters, which are new here, this optimizer's own; a step of their owners' that has begun is dropped."""
        indices = list(indices)
        owners: dict[GradientHooks, None] = {}
        for index in indices:
            parameter = self._parameters[index]
            self._index_of[id(parameter)] = index
            holders = _holders.setdefault(parameter, _Holders())
            holders.every = [one for one in holders.every if one() is not None] + [weakref.ref(self)]
            owner = None if holders.owner is None else holders.owner()
            if owner is not None:
                owners[owner] = None
        for owner in owners:
            owner._tell(lambda listener: listener.interrupt())
        self._take(indices)

    def owners(self) -> list[Any]:
        """The optimizers that parameters of this one belong to, in an order that is the same on every rank; none as a rule."""
        if not self._owners:
            return []
        distinct = {id(optimizer): optimizer for optimizer in self._owners.values()}
        return sorted(distinct.values(), key=lambda optimizer: optimizer._identity)

    def take_back(self) -> None:
        """Makes the parameters that belong to other optimizers this one's own."""
        taken, self._owners = self._owners, {}
        self._take(sorted(taken))

    def _take(self, indices: Iterable[int]) -> None:
        losers: dict[GradientHooks, list[torch.Tensor]] = {}
        for index in indices:
            holders = _holders[self._parameters[index]]
            holders.owner = weakref.ref(self)
            self._waiting.append(index)
            for reference in holders.every:
                other = reference()
                if other is not None and other is not self:
                    losers.setdefault(other, []).append(self._parameters[index])
        for other, parameters in losers.items():
            other._lose(parameters, self.optimizer())
        self.attach()

    def _lose(self, parameters: Iterable[torch.Tensor], to: Any) -> None:
        indices = [self._index_of[id(parameter)] for parameter in parameters]
        for index in indices:
            for handle in self._handles.pop(index, ()):
                handle.remove()
            self._owners[index] = to
        gone = set(indices)
        self._waiting = [index for index in self._waiting if index not in gone]
        self._tell(lambda listener: listener.lose(indices))

    def _tell(self, what: Callable[[Listener], None]) -> None:
        hears = self._listener()
        if hears is not None:
            what(hears)

    def attach(self) -> None:
        """Hooks own parameters that have no hooks yet; PyTorch refuses frozen ones, so these wait to be unfrozen."""
        if not self._waiting:
            return
        frozen = []
        for index in self._waiting:
            parameter = self._parameters[index]
            if not parameter.requires_grad:
                frozen.append(index)
                continue
            self._handles[index] = [
                parameter.register_hook(_before(self._listener, index, self._departed)),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(_after(self._listener, index)),  # type: ignore[no-untyped-call]
            ]
        self._waiting = frozen


def _before(
    listener: weakref.ref[Listener], index: int, departed: Container[int]
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
