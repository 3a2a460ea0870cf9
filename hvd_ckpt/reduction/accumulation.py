"""Gradient accumulations: how many make a gradient ready, and which optimizer counts them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_ckpt.reduction.stats import ReductionStats
from hvd_ckpt.reduction.sums import is_summed, summed_again
from hvd_ckpt.utils import backward_errors
from hvd_ckpt.utils.torch_private import run_first

# A parameter's gradient may arrive in several parts: once per use in a recomputed segment, once per micro-batch. The number of
# accumulations between two synchronizations is learned, and a gradient is ready after as many.


class AccumulationCounts:
    """Learns how many accumulations each of ``n`` gradients takes between two synchronizations.

    A count rises at once. It falls only after two equal lower steps, so that one short step (the last, shorter accumulation group
    of an epoch, say) does not make the next full one late. ``expected`` is a plain list so that the hook which runs once per
    gradient costs two list look-ups.
    """

    def __init__(self, n: int) -> None:
        self.arrived: list[int] = [0] * n
        self.expected: list[int] = [0] * n
        self.last_arrival = [0] * n  # place among this step's accumulations, from 1; 0 without one
        self._lower: list[int] = [-1] * n
        self._clock = 0
        self.learned = False

    def extend(self, n: int) -> None:
        """Adds ``n`` parameters that never arrived."""
        for counts in (self.arrived, self.expected, self.last_arrival):
            counts.extend([0] * n)
        self._lower.extend([-1] * n)

    def count(self, index: int) -> int:
        """Counts one accumulation; returns how often the parameter has arrived in this step."""
        self._clock += 1
        self.last_arrival[index] = self._clock
        self.arrived[index] += 1
        return self.arrived[index]

    def close_step(self, learn: bool = True) -> None:
        """Learns from this step's accumulations (unless ``learn`` is False) and starts the next step."""
        if learn and self._clock:
            if not self.learned:
                self.expected = list(self.arrived)
                self.learned = True
            elif self.arrived != self.expected:
                # Expected is 4: after steps of 4, 3, 4 and 3 accumulations it still is; after 3
                # and 3 in a row it is 3; after 5 at once 5.
                for index, (arrived, expected) in enumerate(zip(self.arrived, self.expected)):
                    if arrived < expected and arrived != self._lower[index]:
                        self._lower[index] = arrived
                    else:
                        self.expected[index] = arrived
                        self._lower[index] = -1
            elif max(self._lower) >= 0:
                # The step was as expected, so a lower one before it was an exception and not the first of two.
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


# A parameter belongs to the optimizer that was made over it last: two that counted its gradients would both reduce them. Ranks make
# optimizers together, so they agree on the owner, whatever Python has collected where. A step that the owner before has begun is
# dropped, and its next one is an error.
_owners: Any = WeakTensorKeyDictionary()  # by parameter, a weak reference to the reducer


def owner_of(parameter: torch.Tensor) -> Any | None:
    """The distributed optimizer that a parameter belongs to, or None."""
    reducer = _reducer_of(parameter)
    return None if reducer is None else reducer.optimizer()


def _reducer_of(parameter: torch.Tensor) -> OwningReducer | None:
    reference = _owners.get(parameter)
    return None if reference is None else reference()


class OwningReducer(ABC):
    """Base of reducers: ownership of parameters, and notification of their gradients.

    Each parameter has two hooks: one before a gradient is accumulated (it also runs for ``torch.autograd.grad``, which accumulates
    nothing), one after.

    Args:
        names, parameters: by index; kept, and may grow.
        watched: the indices for which :meth:`before_accumulation` is called; kept, and may change.
        sums: gradients are added up, and not averaged.

    Attributes:
        active: a gradient has arrived since the last synchronization.
        last_forward: see :class:`~hvd_ckpt.utils.backward_errors.RaisesOnAll`.
        stats: what has left when.
        notice: the next synchronization tells all ranks that one of them has something to say.
        noticed: whether any rank had a notice in the last synchronization.
        optimizer: weak reference to the optimizer, once :meth:`begin` has been called.
    """

    _identity: int
    _generation: int

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], watched: Container[int], sums: bool
    ) -> None:
        self.sums = sums
        self._sums: set[int] = set()  # gradients that were sums when the last backward pass reached them
        self.active = False
        self.stats = ReductionStats()
        self.notice = self.noticed = False
        self.optimizer: Callable[[], Any] = lambda: None
        self._names, self._parameters, self._watched_indices = names, parameters, watched
        self._number_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._handles: dict[int, list[Any]] = {}
        self._unhooked: list[int] = []  # parameters owned here that have no hooks yet
        self._lost: str | None = None  # the first parameter that another optimizer owns now
        self._mismatch: Exception | None = None
        self.last_forward = 0
        backward_errors.register(self)

    @property
    @abstractmethod
    def process_set(self) -> Any:
        """The ranks that reduce together."""

    def has_all(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these are among the parameters."""
        return self._number_of.keys() >= set(map(id, parameters))

    def take_over(self, error: Exception) -> bool:
        """Raises an error of this rank's backward pass on every rank, in the next synchronization.

        Returns:
            False where no synchronization is to come, or this rank is the only one.
        """
        if not self.active or self.process_set.size() == 1:
            return False
        self._mismatch = self._mismatch or error
        return True

    def begin(self, optimizer: Any) -> None:
        """Acquires all parameters. Call it on every rank."""
        self.optimizer = weakref.ref(optimizer)
        self.acquire(range(len(self._parameters)))

    def acquire(self, indices: Iterable[int]) -> None:
        """Makes this reducer the owner of parameters that are new here; a step that their owners have begun is dropped."""
        before: dict[OwningReducer, list[torch.Tensor]] = {}
        for index in indices:
            parameter = self._parameters[index]
            self._number_of[id(parameter)] = index
            owner = _reducer_of(parameter)
            if owner is not None and owner is not self:
                before.setdefault(owner, []).append(parameter)
            _owners[parameter] = weakref.ref(self)
            self._unhooked.append(index)
        for owner, parameters in before.items():
            owner.lose(parameters)
        self.hook_parameters()

    def lose(self, parameters: Sequence[torch.Tensor]) -> None:
        """Another optimizer owns these parameters now; a step that has begun is dropped."""
        if self.active:
            self.abandon()
        else:
            # On another rank the step may have begun; it is dropped and renamed by
            # abandon() there. Names must stay equal on all.
            self.rename_anew()
        indices = sorted(self._number_of[id(parameter)] for parameter in parameters)
        for index in indices:
            for handle in self._handles.pop(index, ()):
                handle.remove()
        self._unhooked = [index for index in self._unhooked if index not in indices]
        self._lost = self._names[indices[0]]

    def check_owner(self) -> None:
        """Raises RuntimeError, the same on every rank, if another optimizer owns some of the parameters now."""
        if self._lost is not None:
            raise RuntimeError(
                f"parameter '{self._lost}' belongs to the DistributedOptimizer that was made over it last, and this is an earlier "
                f"one, which cannot reduce or step it any more; use the last one, or make another, on every rank"
            )

    def hook_parameters(self) -> None:
        """Hooks parameters owned here that have no hooks yet; PyTorch refuses frozen ones, so these wait to be unfrozen."""
        frozen = []
        for index in self._unhooked:
            parameter = self._parameters[index]
            if parameter.requires_grad:
                before, first, after = _hooks(weakref.ref(self), index, self._watched_indices)
                hidden = run_first(parameter, first)
                self._handles[index] = [
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    *(() if hidden is None else (hidden,)),
                    parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
                ]
            else:
                frozen.append(index)
        self._unhooked = frozen

    def hook_unfrozen(self, indices: Container[int]) -> None:
        """Hooks parameters whose gradients are about to leave: the next ones must find room, and some may have been frozen when the
        step began."""
        if any(index in indices for index in self._unhooked):
            self.hook_parameters()

    @property
    def naming(self) -> tuple[int, int]:
        """Identity and generation, as :meth:`rename` has set them."""
        return self._identity, self._generation

    def rename(self, identity: int, generation: int) -> None:
        """Names this optimizer's tensors; the same on every rank."""
        self._identity, self._generation = identity, generation
        self._name_tensors(f"hvd_ckpt.{identity}.{generation}")

    def rename_anew(self) -> None:
        """Gives tensors names that were not used before, since those with the last ones may still be on their way."""
        self.rename(self._identity, self._generation + 1)

    def synchronize(self) -> None:
        """Reduces what is left of this step's gradients. Collective.

        Raises:
            ValueError, RuntimeError: what ranks have does not fit; the same on every rank.
            horovod.common.exceptions.HorovodInternalError: a rank has gone.
        """
        try:
            self._synchronize()
        except BaseException:
            self.abandon()
            raise

    def forget_step(self) -> None:
        """Forgets the accumulations of a step whose gradients are reduced elsewhere."""
        self._end_step(learn=False)

    @abstractmethod
    def _synchronize(self) -> None: ...

    @abstractmethod
    def _end_step(self, learn: bool) -> None:
        """The next step begins; with ``learn`` it expects what this one has had."""

    @abstractmethod
    def _name_tensors(self, prefix: str) -> None: ...

    @abstractmethod
    def before_accumulation(self, index: int) -> None:
        """A gradient of a parameter whose bucket has left is about to be accumulated."""

    @abstractmethod
    def hide_late(self, index: int) -> None:
        """A gradient has been accumulated, and hooks of the user follow: a late part of it must not pass for the whole."""

    @abstractmethod
    def after_accumulation(self, index: int) -> None:
        """A gradient of the parameter has been accumulated."""

    @abstractmethod
    def changes(self) -> list[tuple[int, torch.Tensor | None]] | None:
        """The gradients that were dropped (None) or changed in place since the last synchronization, by the parameters' indices.

        Returns:
            None if there is a new one, of a backward pass or set by hand
        """

    def look_for_sums(self, indices: Iterable[int]) -> None:
        """With ``op=Sum``, makes it an error of the next synchronization that a gradient is a sum already."""
        for index in indices if self.sums and self.process_set.size() > 1 else ():
            if is_summed(self._parameters[index].grad):
                self._mismatch = self._mismatch or summed_again(self._names[index])

    def before_adding(self, index: int) -> None:
        """A backward pass, or ``torch.autograd.grad()``, which adds nothing, has reached a gradient."""
        if self.sums:
            change = self._sums.add if is_summed(self._parameters[index].grad) else self._sums.discard
            change(index)

    def added(self, index: int) -> None:
        """A backward pass has added to a gradient."""
        if index in self._sums and self.process_set.size() > 1:
            self._mismatch = self._mismatch or summed_again(self._names[index])

    @abstractmethod
    def note_changes(self, cleared: bool = False) -> None:
        """All ranks have changed their reduced gradients in the same way; these now count as the last synchronization's.

        Args:
            cleared: they are zeros or None.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Drops the step that has begun, and all gradients. Call it on every rank."""


def _hooks(
    reference: weakref.ref[OwningReducer], index: int, watched: Container[int]
) -> tuple[Callable[[torch.Tensor], None], ...]:
    """The three hooks of a parameter: before an accumulation, and first and last after it. They hold the reducer weakly, since they
    live as long as the parameter."""

    def before(gradient: torch.Tensor) -> None:
        if index in watched:  # the usual gradient ends here
            reducer = reference()
            if reducer is not None:
                reducer.before_accumulation(index)

    def first(parameter: torch.Tensor) -> None:
        reducer = reference()
        if reducer is not None and index in watched:
            reducer.hide_late(index)

    def after(parameter: torch.Tensor) -> None:
        reducer = reference()
        if reducer is not None:
            reducer.last_forward = backward_errors.last_forward()
            reducer.after_accumulation(index)

    return before, first, after
