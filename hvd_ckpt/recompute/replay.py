"""Dropped results and their replay.

A :class:`Call` is a torch function that ran in the forward pass. Each of its arguments is a kept tensor or the result of another
such call. Calls that are connected form a :class:`Group`. Autograd holds a :class:`Holder` in place of each dropped tensor. The
first holder that it unpacks replays the group: all calls of the group whose results or saved tensors are wanted run again, in
their old order. Results for holders that have not been unpacked yet are cached until they are.

In place of a kept tensor, autograd holds what a :class:`.keeper.Keeper` returns.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.recompute.calls import call_name, depends_on_arguments_alone, is_custom, map_tensors, tensors_in
from hvd_ckpt.recompute.environment import Environment
from hvd_ckpt.recompute.keeper import (
    Keeper,
    Kept,
    Plain,
    changed_in_place,
    memory_of,
    saving_nothing,
    version_of,
)
from hvd_ckpt.recompute.masks import Recording, Repeating
from hvd_ckpt.recompute.saved import Compressed
from hvd_ckpt.recompute.verify import Observation, Verification
from hvd_ckpt.utils.random_sources import Source, drawing_from, global_sources, torch_sources
from hvd_ckpt.utils.spans import span

# Who holds whom. All references point one way, so reference counting frees everything with the graph, and no cycle waits for
# Python's garbage collector:
#
#     node of the graph -> Holder -> Group -> Call -> Stored -> Plain or Kept -> a tensor without its graph
#                            |                 |
#                            +-> Call          +-> Reference -> an earlier Call
#
# During the forward pass, a dropped result also holds its group, through its tag (tape._Tag), and the tape holds the calls.
# Tape.close() removes both.


@dataclass(eq=False)
class Stored:
    """A kept argument of a call."""

    kept: Plain | Kept
    requires_grad: bool


@dataclass(frozen=True)
class Scratch:
    """An argument that the call writes and does not read: running statistics in training mode."""

    tensor: Tensor


@dataclass(eq=False)
class Reference:
    """An argument that is a result of an earlier dropped call."""

    call: Call
    output: int
    requires_grad: bool


@dataclass(eq=False, slots=True)
class Call:
    """A torch function that ran in the forward pass.

    Attributes:
        func, args, kwargs: with Stored, Scratch and Reference in the place of tensors.
        number: calls are replayed in this order.
        environment: what else its results depend on; calls that ran one after the other usually share one.
        random: the random states that it started from, if it has drawn random numbers other than ``masks``.
        masks: the random masks that it has drawn.
        references: the results of earlier calls among its arguments, each once.
        inner: number of its inner tensors: new tensors that autograd saved while it ran, such as a mask or a result.
        wanted: number of holders for each result (keys 0, 1, ...) and each inner tensor (keys -1, -2, ...).
        cache: for keys of ``wanted``: the tensor, the number of holders that have not unpacked it yet, and its version.
        in_place: it changes its first argument.
        alias: its results lie in the memory of kept arguments.
        read: a later dropped call reads one of its results.
    """

    func: Callable[..., Any]
    number: int
    environment: Environment
    random: list[Source]
    masks: Sequence[Compressed] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    references: list[Reference] = field(default_factory=list)
    inner: int = 0
    wanted: dict[int, int] = field(default_factory=dict)
    cache: dict[int, list[Any]] = field(default_factory=dict)
    in_place: bool = False
    alias: bool = False
    read: bool = False

    @classmethod
    def begun(
        cls, func: Callable[..., Any], number: int, inputs: Sequence[Tensor], earlier: Environment | None
    ) -> Call:
        """A call that is about to run. ``earlier`` is the environment of another call, which is kept if it is still the same."""
        environment = earlier if earlier is not None and earlier.is_current() else Environment()
        random: list[Source] = []
        if not depends_on_arguments_alone(func):
            random = torch_sources(inputs) + (global_sources() if is_custom(func) else [])
        return cls(func, number, environment, random)

    def ran(self, recording: Recording | None, keeper: Keeper) -> None:
        """Called when the call has run in the forward pass: drops the random states if no more was drawn than recorded masks."""
        if recording is not None and recording.complete:
            self.random = []
            self.masks = [keeper.keep_bits(mask, call_name(self.func)) for mask in recording.masks]
        elif not any(source.moved() for source in self.random):
            self.random = []

    def keep(self, inner: Sequence[Tensor]) -> None:
        """Keeps the inner tensors of a call that turned out not to be repeatable."""
        for number, tensor in enumerate(inner, start=1):
            # No number of holders uses it up: nothing can compute it again, and a further backward pass may ask for it.
            self.cache[-number] = [tensor.detach(), math.inf, version_of(tensor)]
        self.inner = 0


class Group:
    """Calls that are connected through dropped results.

    At a break (``Policy.breaks``), an argument of a group is a result of another group. That result is recomputed for this group
    and not cached, which takes less memory and more time.

    A new call makes a new group and merges the groups of its arguments into it. Holders keep the group that they were made with
    and find the current one by :meth:`root`.
    """

    __slots__ = ("_lock", "calls", "merged_into")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.merged_into: Group | None = None
        self._lock = threading.RLock()

    def root(self) -> Group:
        group = self
        while group.merged_into is not None:
            group = group.merged_into
        return group

    def merge(self, other: Group) -> None:
        if other is self:
            return
        self.calls += other.calls
        other.calls = []
        other.merged_into = self

    def take(self, call: Call, key: int) -> Tensor:
        """The tensor that a holder stands for; replays the group unless the tensor is cached."""
        with self._lock:
            # Autograd unpacks on one thread for each device: the lock lets one of them replay and the others read its cache.
            if key not in call.cache:
                with span("recompute", self._title):
                    _run_again([member for member in self.calls if member.wanted], set(self.calls))
            tensor = _cached(call, key)
            entry = call.cache[key]
            entry[1] -= 1
            if entry[1] == 0:
                del call.cache[key]
            return tensor

    def _title(self) -> str:
        """Names of the calls, for a trace."""
        names = [call_name(call.func) for call in self.calls]
        return f"recompute {', '.join(names if len(names) <= 4 else [*names[:3], '...', names[-1]])}"


def _cached(call: Call, key: int) -> Tensor:
    """A cached tensor of a call; raises RuntimeError if a call that was replayed after it has changed the tensor in place."""
    tensor: Tensor = call.cache[key][0]
    if version_of(tensor) != call.cache[key][2]:
        raise changed_in_place(call.cache[key][2], version_of(tensor), call_name(call.func))
    return tensor


def _compute(reference: Reference) -> Tensor:
    """One result for another group that begins with it; nothing is cached."""
    if reference.output in reference.call.cache:
        return _cached(reference.call, reference.output)
    place = reference.call, reference.output
    return _run_again([reference.call], None, place)[place]


def _run_again(
    wanted: Sequence[Call], members: Container[Call] | None, *returned: tuple[Call, int]
) -> dict[tuple[Call, int], Tensor]:
    """Runs the wanted calls and the calls they depend on, in order.

    Args:
        members: the calls of the group that is replayed, whose wanted tensors are cached; results of other groups come from
            :func:`_compute`. None to compute results only, without inner tensors, across groups.
        returned: results that are returned, by call and number.
    """
    # First backward through the references, to find the calls that are needed and to count the readers of each result; then
    # forward. A result is freed when its last reader has run.
    readers: dict[tuple[Call, int], int] = defaultdict(int, dict.fromkeys(returned, 1))
    read: set[Call] = set()
    needed, open_calls = set(wanted), list(wanted)
    while open_calls:
        for reference in open_calls.pop().references:
            readers[reference.call, reference.output] += 1
            # _compute() returns a result that is cached or belongs to another group.
            if reference.output in reference.call.cache if members is None else reference.call not in members:
                continue
            read.add(reference.call)
            if reference.call not in needed:
                needed.add(reference.call)
                open_calls.append(reference.call)
    values: dict[tuple[Call, int], Tensor] = {}
    in_order = sorted(needed, key=lambda call: call.number)
    for environment, calls in itertools.groupby(in_order, key=operator.attrgetter("environment")):
        # Without autocast's cache, which must not hold a cast of a replayed argument.
        with environment.entered(caching=False), saving_nothing():
            for call in calls:
                for reference in call.references:
                    place = (reference.call, reference.output)
                    if place not in values:
                        values[place] = _compute(reference)
                result_needed = members is None or call in read or any(key >= 0 for key in call.wanted)
                results, inner = _Run(call, values, result_needed, inner_needed=members is not None).run()
                for reference in call.references:
                    place = (reference.call, reference.output)
                    readers[place] -= 1
                    if readers[place] == 0:
                        del values[place]
                for output, result in enumerate(results):
                    if readers[call, output]:
                        values[call, output] = result
                for key, count in call.wanted.items() if members is not None else ():
                    tensor = results[key] if key >= 0 else inner[-1 - key]
                    assert tensor is not None
                    call.cache[key] = [tensor, count, version_of(tensor)]
    return values


_SPECIFIED = (Stored, Scratch, Reference)
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class _Enough(Exception):
    """Ends a call early: all tensors that were wanted of it have been saved."""


class _Run:
    """Runs a call again.

    Everything that a result depends on is as it was: the settings of the environment (PyTorch also chooses kernels by whether
    gradients are enabled), modes, random state, and which arguments are the same tensor. Autograd saves nothing here: ``_pack``
    sees what it would save, skips the arguments, numbers the rest as ``Tape.pack`` did, and ends the call once the last wanted
    tensor has appeared, so that a matrix product that is the last step of a call need not run.
    """

    def __init__(
        self, call: Call, values: dict[tuple[Call, int], Tensor], result_needed: bool, inner_needed: bool
    ) -> None:
        self._call, self._values, self._result_needed = call, values, result_needed
        # Numbers of the inner tensors that are wanted, and the last of them.
        self._wanted = {-1 - key for key in call.wanted if key < 0} if inner_needed else set()
        self._last = max(self._wanted, default=-1)
        # By specification: each tensor with its version and, if inner tensors are wanted, its memory.
        self._arguments: dict[int, tuple[Tensor, int, int | None]] = {}
        self._inner: list[Tensor | None] = []

    def run(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The results, and the inner tensors with None for those that are not wanted."""
        call, results = self._call, []
        args = map_tensors(self._argument, _SPECIFIED, call.args)
        kwargs = map_tensors(self._argument, _SPECIFIED, call.kwargs)
        random = (
            drawing_from(call.random) if call.random else Repeating(call.masks) if call.masks else _NOTHING
        )
        hooks = saving_nothing(self._pack) if self._wanted else _NOTHING
        try:
            with random, hooks:
                result = call.environment.modes.run(call.func, args, kwargs)
                results = [tensor.detach() for tensor in tensors_in(result)]
        except _Enough:
            pass
        finally:
            # A cycle otherwise: the hooks hold the arguments; after a change in place, an argument is a result, and its graph
            # holds the hooks.
            self._arguments.clear()
        if len(self._inner) <= self._last:
            raise RuntimeError(
                f"'{call_name(call.func)}' saved {len(self._inner)} tensor(s) of its own when it was computed again, and more in "
                "the forward pass: it must save the same tensors each time."
            )
        return results, self._inner

    def _argument(self, spec: Any) -> Tensor:
        # Arguments that were the same tensor are the same tensor again: attention tests whether its key is its query.
        if id(spec) not in self._arguments:
            tensor = self._build(spec)
            memory = memory_of(tensor) if self._wanted else None
            self._arguments[id(spec)] = tensor, version_of(tensor), memory
        return self._arguments[id(spec)][0]

    def _build(self, spec: Any) -> Tensor:
        if isinstance(spec, Scratch):
            return spec.tensor.clone()
        tensor: Tensor = (
            self._values[spec.call, spec.output] if isinstance(spec, Reference) else spec.kept.get()
        )
        tensor = tensor.detach()
        if spec.requires_grad:
            tensor.requires_grad_()
            if self._call.in_place and not self._arguments:
                tensor = _NonLeaf.apply(tensor)  # type: ignore[no-untyped-call]
        return tensor

    def _pack(self, tensor: Tensor) -> None:
        if not tensor.numel() or self._is_argument(tensor):
            return
        number = len(self._inner)
        self._inner.append(tensor.detach() if number in self._wanted else None)
        # A kernel that draws random numbers may fill a tensor after it was saved (rrelu does), so such a call runs to its end.
        if not self._result_needed and number >= self._last and not self._call.random:
            raise _Enough

    def _is_argument(self, tensor: Tensor) -> bool:
        """Whether it is an argument that has not changed since, or a view of one."""
        for source, version, _ in self._arguments.values():
            if source is tensor and version_of(source) == version:
                return True
        memory = memory_of(tensor)
        return memory is not None and any(
            known == memory and version_of(source) == version
            for source, version, known in self._arguments.values()
        )


class _NonLeaf(torch.autograd.Function):
    """Identity that makes a leaf a non-leaf in the same memory, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@dataclass(frozen=True)
class View:
    """Place of a view in the memory of another tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the other tensor's

    @classmethod
    def of(cls, tensor: Tensor, source: Tensor) -> View:
        """The place of ``tensor`` in the memory of ``source``."""
        offset = int(tensor.storage_offset()) - int(source.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset)

    def apply(self, source: Tensor) -> Tensor:
        """The view of the replayed tensor."""
        return source.as_strided(self.shape, self.stride, int(source.storage_offset()) + self.offset)


@dataclass(eq=False)
class Holder:
    """Stand-in that autograd holds for a dropped tensor: for a result or an inner tensor of a call, or for a view of one.

    Attributes:
        seen: the verification of this pass and how the tensor looked; None in a pass that is not verified.
    """

    group: Group
    call: Call
    key: int
    view: View | None = None
    seen: tuple[Verification, Observation] | None = None

    def get(self) -> Tensor:
        """The tensor, which is computed again unless it is cached."""
        tensor = self.group.root().take(self.call, self.key)
        if self.view is not None:
            tensor = self.view.apply(tensor)
        if self.seen is not None:
            verification, observation = self.seen
            name = call_name(self.call.func)
            what = f"the result of '{name}'" if self.key >= 0 else f"a tensor that '{name}' saved"
            verification.compare([(observation, tensor)], what)
        return tensor


unpack: Callable[[Any], Tensor] = operator.methodcaller("get")
"""Returns the tensor that was packed; the inverse of :meth:`.tape.Tape.pack`."""
