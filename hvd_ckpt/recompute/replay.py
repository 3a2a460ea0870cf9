"""Dropped results, and how they come back.

A :class:`Call` is a torch function that ran in the forward pass, with arguments that are either kept or results of
other such calls. Calls that are connected form a :class:`Group`. Autograd holds :class:`Holder` objects in place of
tensors; the first one it unpacks lets its group be replayed: those calls run again, in the order in which they ran, whose
results or saved tensors are wanted. What the others of the group will ask for is cached until they have asked.

In place of a tensor that is kept, autograd holds what a :class:`.keeper.Keeper` returns (``Plain``, ``Kept``), or fewer bytes of
it (``Compressed``, or ``Packed`` where a keeper collects). A tensor among a call's arguments is ``Stored``, ``Scratch`` or a
``Reference``.

References point one way only (holder, group, call, argument), so that everything is freed with the graph.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hvd_ckpt.recompute.calls import call_name, depends_on_arguments_alone, is_custom, map_tensors, tensors_in
from hvd_ckpt.recompute.keeper import (
    Kept,
    Packed,
    Plain,
    RandomState,
    attention_kernels,
    autocast_context,
    autocast_state,
    changed_in_place,
    default_dtype,
    memory_of,
    saving_nothing,
    version_of,
)
from hvd_ckpt.recompute.saved import Compressed
from hvd_ckpt.recompute.verify import Observation, Verification
from hvd_ckpt.utils.spans import span


@dataclass(eq=False)
class Stored:
    """A kept argument of a call."""

    kept: Plain | Kept
    requires_grad: bool


@dataclass(frozen=True)
class Scratch:
    """An argument that the call changes without reading it: running statistics in training mode."""

    tensor: Tensor


@dataclass(eq=False)
class Reference:
    """An argument that is a result of an earlier dropped call."""

    call: Call
    output: int
    requires_grad: bool


class Call:
    """A torch function that ran in the forward pass.

    Attributes:
        func, args, kwargs: with Stored, Scratch and Reference in the place of tensors.
        number: calls are replayed in this order.
        inner: how many tensors it saved besides its arguments (results, or something like a mask).
        wanted: how many holders there are for each result (0, 1, ...) and each of those inner tensors (-1, -2, ...).
        grad: whether gradients were enabled.
        autocast: whether autocast was on, and for what.
        dtype: the default dtype.
        random: the random state that it started from, if it has drawn random numbers.
        attention: the kernels that were allowed for attention, if it may be one.
        in_place: it changes its first argument.
        alias: its results lie in the memory of kept arguments.
        read: a later dropped call reads one of its results.
        cache: for keys in ``wanted``, the tensor, how many holders have not asked yet, and the tensor's version.
    """

    __slots__ = (
        "alias", "args", "attention", "autocast", "cache", "dtype", "func", "grad", "in_place", "inner", "kwargs", "number",
        "random", "read", "wanted",
    )  # fmt: skip

    def __init__(self, func: Callable[..., Any], number: int, inputs: Sequence[Tensor]) -> None:
        self.func = func
        self.number = number
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast_state(inputs[0].device.type if inputs else "cpu")
        self.dtype = torch.get_default_dtype()
        self.random: RandomState | None = None
        self.attention: tuple[SDPBackend, ...] | None = None
        if not depends_on_arguments_alone(func):
            self.random = RandomState(*inputs, python=is_custom(func))
            self.attention = attention_kernels()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.inner = 0
        self.wanted: dict[int, int] = {}
        self.in_place = False
        self.alias = False
        self.read = False
        self.cache: dict[int, list[Any]] = {}

    def ran(self) -> None:
        """The call has run in the forward pass: forgets the random state if nothing was drawn from it."""
        if self.random is not None and not self.random.moved():
            self.random = None

    def keep(self, inner: Sequence[Tensor]) -> None:
        """The call cannot be repeated, so the tensors that it saved besides its arguments are kept."""
        for number, tensor in enumerate(inner, start=1):
            self.cache[-number] = [tensor.detach(), math.inf, version_of(tensor)]
        self.inner = 0

    def references(self) -> Iterator[Reference]:
        references: list[Reference] = []
        map_tensors(references.append, Reference, (self.args, self.kwargs))
        return iter(references)


class Group:
    """Calls that are connected through dropped results.

    At a break (``Policy.breaks``) the first argument of a group is a result of another group. That result is recomputed for this
    group alone and not cached: less memory, more time.
    """

    __slots__ = ("_calls", "_lock", "_merged_into")

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._merged_into: Group | None = None
        self._lock = threading.RLock()

    def root(self) -> Group:
        group = self
        while group._merged_into is not None:
            group = group._merged_into
        return group

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def merge(self, other: Group) -> None:
        if other is self:
            return
        self._calls += other._calls
        other._calls = []
        other._merged_into = self

    def take(self, call: Call, key: int) -> Tensor:
        """The tensor that a holder stands for; replays the group if it is not there."""
        with self._lock:
            if key not in call.cache:
                with span("recompute", self._title):
                    self._replay()
            tensor = _cached(call, key)
            entry = call.cache[key]
            entry[1] -= 1
            if entry[1] == 0:
                del call.cache[key]
            return tensor

    def _title(self) -> str:
        """The calls, for a trace."""
        names = [call_name(call.func) for call in self._calls]
        return f"recompute {', '.join(names if len(names) <= 4 else [*names[:3], '...', names[-1]])}"

    def _replay(self) -> None:
        """Runs all calls again whose results or inner tensors are wanted, and caches those."""
        members = set(self._calls)
        for call, results, inner in _run_again({call for call in members if call.wanted}, members):
            for key, count in call.wanted.items():
                tensor = results[key] if key >= 0 else inner[-1 - key]
                assert tensor is not None
                call.cache[key] = [tensor, count, version_of(tensor)]


def _cached(call: Call, key: int) -> Tensor:
    """The contents of a call's cache. A later call that was replayed too may have changed them in place, as in the forward pass."""
    tensor: Tensor = call.cache[key][0]
    if version_of(tensor) != call.cache[key][2]:
        raise changed_in_place(call.cache[key][2], version_of(tensor), call_name(call.func))
    return tensor


def _compute(reference: Reference) -> Tensor:
    """One result, for a group that begins with it; nothing is cached."""
    if reference.output in reference.call.cache:
        return _cached(reference.call, reference.output)
    result: Tensor | None = None
    for call, results, _ in _run_again({reference.call}, None):
        if call is reference.call:
            result = results[reference.output]
    assert result is not None
    return result


def _run_again(
    wanted: set[Call], members: Container[Call] | None
) -> Iterator[tuple[Call, list[Tensor], list[Tensor | None]]]:
    """Runs the wanted calls and those they depend on, in order.

    Args:
        members: the calls of the group that is replayed; what it reads of others is computed. None: results alone, without
            what the calls saved, of whatever group.
    """
    readers: dict[tuple[Call, int], int] = defaultdict(int)
    read: set[Call] = set()
    needed, open_calls = set(wanted), list(wanted)
    while open_calls:
        for reference in open_calls.pop().references():
            readers[reference.call, reference.output] += 1
            # Cached, or of another group: :func:`_compute` returns it.
            if reference.output in reference.call.cache if members is None else reference.call not in members:
                continue
            read.add(reference.call)
            if reference.call not in needed:
                needed.add(reference.call)
                open_calls.append(reference.call)
    values: dict[tuple[Call, int], Tensor] = {}
    for call in sorted(needed, key=lambda call: call.number):
        for reference in call.references():
            place = (reference.call, reference.output)
            if place not in values:
                values[place] = _compute(reference)
        result_needed = members is None or call in read or any(key >= 0 for key in call.wanted)
        results, inner = _run(call, values, result_needed, inner_needed=members is not None)
        for reference in call.references():
            place = (reference.call, reference.output)
            readers[place] -= 1
            if readers[place] == 0:
                del values[place]
        for output, result in enumerate(results):
            if readers[call, output]:
                values[call, output] = result
        yield call, results, inner


class _Enough(Exception):
    """Everything that was wanted of a call has been saved."""


def _run(
    call: Call, values: dict[tuple[Call, int], Tensor], result_needed: bool, inner_needed: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Runs a call again; returns its results and, if needed, the inner tensors that it saved and are wanted.

    It runs with gradients where it did so in the forward pass, needed or not: kernels are chosen by that too.
    """
    name = call_name(call.func)
    storages: list[tuple[int | None, Tensor, int]] = []
    arguments: dict[int, Tensor] = {}

    def argument(spec: Any) -> Tensor:
        # The same tensor twice must be the same tensor again: attention asks whether its key is its query.
        if id(spec) not in arguments:
            tensor = arguments[id(spec)] = build(spec)
            storages.append((memory_of(tensor), tensor, version_of(tensor)))
        return arguments[id(spec)]

    def build(spec: Any) -> Tensor:
        if isinstance(spec, Scratch):
            return spec.tensor.clone()
        tensor: Tensor = values[spec.call, spec.output] if isinstance(spec, Reference) else spec.kept.get()
        tensor = tensor.detach()
        if spec.requires_grad:
            tensor.requires_grad_()
            if call.in_place and not arguments:
                tensor = _NonLeaf.apply(tensor)  # type: ignore[no-untyped-call]
        return tensor

    last = max((-1 - key for key in call.wanted if key < 0), default=-1) if inner_needed else -1
    inner: list[Tensor | None] = []

    def pack(tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if not tensor.numel() or any(
            (source is tensor or (memory is not None and memory == storage)) and version_of(source) == version
            for storage, source, version in storages
        ):
            return
        inner.append(tensor.detach() if inner_needed and -1 - len(inner) in call.wanted else None)
        # A kernel that draws random numbers may fill what has been saved before it runs (rrelu does).
        if not result_needed and len(inner) > last and call.random is None:
            raise _Enough

    results: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.grad))
        args, kwargs = map_tensors(argument, (Stored, Scratch, Reference), (call.args, call.kwargs))
        # Entered even where it is on: a cast of an argument must not stay in autocast's own cache.
        if any(state[1] for state in (*call.autocast, *autocast_state(call.autocast[-1][0]))):
            stack.enter_context(autocast_context(call.autocast)())
        if call.random is not None:
            stack.enter_context(call.random())
        if call.attention is not None and call.attention != attention_kernels():
            stack.enter_context(sdpa_kernel(list(call.attention)))
        if call.dtype != torch.get_default_dtype():
            stack.enter_context(default_dtype(call.dtype))
        stack.enter_context(saving_nothing(pack))
        # The hooks keep ``pack`` alive, and a change in place makes an argument its own result, which keeps the hooks alive.
        stack.callback(storages.clear)
        stack.callback(arguments.clear)
        with contextlib.suppress(_Enough):
            results = [result.detach() for result in tensors_in(call.func(*args, **kwargs))]
    if len(inner) <= last:
        raise RuntimeError(
            f"'{name}' saved {len(inner)} tensor(s) of its own when it was computed again, and more in the forward pass: it must "
            "do the same each time."
        )
    return results, inner


class _NonLeaf(torch.autograd.Function):
    """The same memory as a non-leaf tensor, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@dataclass(frozen=True)
class View:
    """Where a view lies in the memory of another tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the other tensor's

    @classmethod
    def of(cls, tensor: Tensor, source: Tensor) -> View:
        """The place of ``tensor`` in the memory of ``source``."""
        offset = int(tensor.storage_offset()) - int(source.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset)

    def apply(self, source: Tensor) -> Tensor:
        """The view of that other tensor, come back."""
        return source.as_strided(self.shape, self.stride, int(source.storage_offset()) + self.offset)


@dataclass(eq=False)
class Holder:
    """Stand-in that autograd holds for a dropped tensor: a result or inner tensor of a call, or a view of it.

    Attributes:
        seen: the tensor as it was, and what compares it when it is back; None in a pass that is not verified.
    """

    group: Group
    call: Call
    key: int
    view: View | None = None
    seen: tuple[Verification, Observation] | None = None

    def get(self) -> Tensor:
        """The tensor, computed again if it is not there."""
        tensor = self.group.root().take(self.call, self.key)
        if self.view is not None:
            tensor = self.view.apply(tensor)
        if self.seen is not None:
            verification, observation = self.seen
            name = call_name(self.call.func)
            what = f"the result of '{name}'" if self.key >= 0 else f"a tensor that '{name}' saved"
            verification.compare([(observation, tensor)], what)
        return tensor


def unpack(packed: Holder | Plain | Kept | Packed | Compressed) -> Tensor:
    """The tensor for what was packed."""
    return packed.restore() if isinstance(packed, Compressed) else packed.get()
