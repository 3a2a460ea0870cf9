"""Dropped results, and how they come back.

A :class:`Call` is a torch function that ran in the forward pass, with arguments that are either kept or results of
other such calls. Calls that are connected form a :class:`Group`. Autograd holds :class:`Holder` objects in place of
tensors; the first one it unpacks lets its group be replayed: those calls run again, in the order in which they ran, whose
results or saved tensors are wanted. What the others of the group will ask for is cached until they have asked.

References point one way only (holder, group, call, argument), so that everything is freed with the graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_ckpt.recompute.calls import call_name, is_random, map_tensors, tensors_in
from hvd_ckpt.recompute.saved import Compressed
from hvd_ckpt.recompute.state import autocast_context, autocast_state, random_context

__all__ = ["Call", "Group", "Holder", "Keeper", "Kept", "Reference", "Scratch", "Stored", "unpack"]

View = tuple[tuple[int, ...], tuple[int, ...], int]


class Keeper:
    """Where kept tensors are until the backward pass.

    Usually nowhere: autograd and the calls hold them. But where saved-tensor hooks of somebody else are active (an outer
    region that is recomputed as a whole, ``save_on_cpu``), kept tensors must go through those hooks; then they are collected
    and, at the end of the forward pass, saved all together by a node of their own.
    """

    def __init__(self) -> None:
        self.collecting = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        self._tensors: list[Tensor] | None = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._node: Any = None

    def keep(self, tensor: Tensor) -> Any:
        """What to hold in place of ``tensor``: itself without its graph (which would be a cycle), or its number."""
        if not self.collecting:
            return tensor.detach() if tensor.grad_fn is not None else tensor
        assert self._tensors is not None
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor.detach())
        return Kept(self, number)

    def close(self) -> None:
        """The forward pass is over, and the outer hooks are the active ones again."""
        if self._tensors:
            with torch.enable_grad():
                root = torch.empty(0, requires_grad=True)
                self._node = _SaveAll.apply(root, *self._tensors).grad_fn  # type: ignore[no-untyped-call]
        self._tensors = None
        self._numbers.clear()

    def get(self, number: int) -> Tensor:
        if self._tensors is None:
            self._tensors = list(self._node.saved_tensors)
        return self._tensors[number]


class _SaveAll(torch.autograd.Function):
    """Saves tensors; nothing flows through it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise AssertionError("no gradient flows here")


@dataclass(frozen=True)
class Kept:
    """A tensor that a keeper collected."""

    keeper: Keeper
    number: int


@dataclass(frozen=True)
class Stored:
    """A kept argument of a call."""

    tensor: Any  # a Tensor or a Kept
    requires_grad: bool
    version: int

    def get(self, name: str) -> Tensor:
        if isinstance(self.tensor, Kept):
            return self.tensor.keeper.get(self.tensor.number)
        tensor: Tensor = self.tensor
        if _version(tensor) != self.version:
            raise RuntimeError(
                f"A {tuple(tensor.shape)} tensor that '{name}' needs to be computed again has been changed in place since the "
                f"forward pass (it is at version {_version(tensor)}, expected {self.version})."
            )
        return tensor


@dataclass(frozen=True)
class Scratch:
    """An argument that the call changes without reading it: running statistics in training mode."""

    tensor: Tensor


@dataclass(eq=False)
class Reference:
    """An argument that is a result of an earlier dropped call.

    Attributes:
        group: that call's group if it is another one; None within a group, which would otherwise never be freed.
    """

    call: Call
    output: int
    requires_grad: bool
    group: Group | None


class Call:
    """A torch function that ran in the forward pass.

    Attributes:
        func, args, kwargs: with Stored, Scratch and Reference in the place of tensors.
        number: calls are replayed in this order.
        inner: how many tensors it saved that are none of its arguments (results, or something like a mask).
        wanted: how many holders there are for each result (0, 1, ...) and each of those inner tensors (-1, -2, ...).
        grad: whether gradients were enabled.
        autocast: whether autocast was on, and for what.
        random: a context with the random state that it started from, if it draws random numbers.
        in_place: it changes its first argument.
    """

    __slots__ = (
        "args", "autocast", "cache", "func", "grad", "in_place", "inner", "kwargs", "number", "random", "wanted",
    )  # fmt: skip

    def __init__(self, func: Callable[..., Any], number: int, device: torch.device) -> None:
        self.func = func
        self.number = number
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast_state(device.type)
        self.random = random_context(device) if is_random(func) else None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.inner = 0
        self.wanted: dict[int, int] = {}
        self.in_place = False
        self.cache: dict[int, list[Any]] = {}

    def references(self) -> Iterator[Reference]:
        found: list[Reference] = []
        map_tensors(found.append, Reference, (self.args, self.kwargs))
        return iter(found)


class Group:
    """Calls that are connected through dropped results.

    A group may begin with a result of another one; that is computed for it anew, and the other group keeps nothing of
    it but is replayed in its own time: less memory for more time.
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
                self._replay()
            entry = call.cache[key]
            entry[1] -= 1
            if entry[1] == 0:
                del call.cache[key]
            tensor: Tensor = entry[0]
            return tensor

    def _replay(self) -> None:
        """Runs all calls again whose results or inner tensors are wanted, and caches those."""
        for call, results, inner in self._run_again({call for call in self._calls if call.wanted}):
            for key, count in call.wanted.items():
                call.cache[key] = [results[key] if key >= 0 else inner[-1 - key], count]

    def compute(self, call: Call, output: int) -> Tensor:
        """One result, for another group that begins with it; nothing is cached."""
        with self._lock:
            if output in call.cache:
                tensor: Tensor = call.cache[output][0]
                return tensor
            found: Tensor | None = None
            for one, results, _ in self._run_again({call}, bare=True):
                if one is call:
                    found = results[output]
            assert found is not None
            return found

    def _run_again(
        self, wanted: set[Call], bare: bool = False
    ) -> Iterator[tuple[Call, list[Tensor], list[Tensor | None]]]:
        """Runs the wanted calls and those they depend on, in order; ``bare`` for results alone, without what they saved."""
        self._calls.sort(key=lambda call: call.number)
        readers: dict[tuple[Call, int], int] = defaultdict(int)
        read: set[Call] = set()
        needed: list[Call] = []
        for call in reversed(self._calls):
            if call in wanted or call in read:
                needed.append(call)
                for reference in call.references():
                    readers[reference.call, reference.output] += 1
                    read.add(reference.call)
        values: dict[tuple[Call, int], Tensor] = {}
        for call in reversed(needed):
            for reference in call.references():
                place = (reference.call, reference.output)
                if place not in values:
                    assert reference.group is not None
                    values[place] = reference.group.root().compute(*place)
            result_needed = bare or call in read or any(key >= 0 for key in call.wanted)
            results, inner = _run(call, values, result_needed, inner_needed=not bare)
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
    storages: list[tuple[int, Tensor, int]] = []
    arguments: dict[int, Tensor] = {}

    def argument(spec: Any) -> Tensor:
        # The same tensor twice must be the same tensor again: attention asks whether its key is its query.
        if id(spec) not in arguments:
            tensor = arguments[id(spec)] = build(spec)
            storages.append((tensor.untyped_storage().data_ptr(), tensor, _version(tensor)))
        return arguments[id(spec)]

    def build(spec: Any) -> Tensor:
        if isinstance(spec, Scratch):
            return spec.tensor.clone()
        tensor: Tensor = values[spec.call, spec.output] if isinstance(spec, Reference) else spec.get(name)
        tensor = tensor.detach()
        if spec.requires_grad:
            tensor.requires_grad_()
            if call.in_place and not arguments:
                tensor = _Fresh.apply(tensor)  # type: ignore[no-untyped-call]
        return tensor

    last = max((-1 - key for key in call.wanted if key < 0), default=-1) if inner_needed else -1
    inner: list[Tensor | None] = []

    def pack(tensor: Tensor) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        if not tensor.numel() or any(
            pointer == storage and _version(source) == version for storage, source, version in storages
        ):
            return
        inner.append(tensor.detach() if inner_needed and -1 - len(inner) in call.wanted else None)
        if not result_needed and len(inner) > last:
            raise _Enough

    results: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.grad))
        args, kwargs = map_tensors(argument, (Stored, Scratch, Reference), (call.args, call.kwargs))
        if any(now not in call.autocast for now in autocast_state(call.autocast[-1][0])):
            stack.enter_context(autocast_context(call.autocast)())
        if call.random is not None:
            stack.enter_context(call.random())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _never))
        with contextlib.suppress(_Enough):
            results = [result.detach() for result in tensors_in(call.func(*args, **kwargs))]
    if len(inner) <= last:
        raise RuntimeError(
            f"'{name}' saved {len(inner)} tensor(s) of its own when it was computed again, and more in the forward pass: it must "
            "do the same each time."
        )
    return results, inner


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Fresh(torch.autograd.Function):
    """The same memory as a tensor that is no leaf, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _never(packed: None) -> Tensor:
    raise AssertionError("this graph has no backward pass")


@dataclass(frozen=True)
class Holder:
    """What autograd holds in place of a dropped tensor: a result or inner tensor of a call, or a view of it."""

    group: Group
    call: Call
    key: int
    view: View | None = None


def unpack(packed: Any) -> Tensor:
    """The tensor for what was packed."""
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, Compressed):
        return packed.restore()
    if isinstance(packed, Kept):
        return packed.keeper.get(packed.number)
    assert isinstance(packed, Holder)
    tensor = packed.group.root().take(packed.call, packed.key)
    return tensor if packed.view is None else tensor.as_strided(*packed.view)
