"""Selective recomputation of single torch functions, in code that knows nothing of it.

A region that is recomputed as a whole (:func:`hvd_ckpt.checkpoint`) gives up cheap and expensive results alike. Here
a call runs once, as it is, under a *tape*. For the torch functions that a :class:`Policy` names, the tape notes
function and arguments, and their results are *dropped*: wherever autograd would save one, it gets a holder in its
place. The first holder that the backward pass opens lets the functions behind it be *replayed*, and those connected
with them, from what was kept (:mod:`hvd_ckpt.recompute.replay`). So what is kept is chosen tensor by tensor: a gelu is
cheap to have again, a matrix product is not, and one whose result nobody saved is never done again.

Nothing but torch functions is run again: no module code, no hooks, no side effects. A batch norm counts its batch
once because its module runs once. The graph is the one that autograd built in the forward pass, so every
parameter's gradient is accumulated once.

What the tape does not see is kept: results of custom autograd functions and of compiled ones, and of anything that
changes a tensor in place in a way that cannot be repeated. To keep some and recompute other tensors of one block is
the idea of Checkmate (Jain et al., 2020) and Rockmate (Zhao et al., 2023), which trace a model into a graph and run
that in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import functional

from hvd_ckpt.recompute.calls import CallMode, call_name, in_place, map_tensors, tensors_in
from hvd_ckpt.recompute.replay import Call, Group, Holder, Keeper, Reference, Scratch, Stored, View, unpack
from hvd_ckpt.recompute.saved import compress

__all__ = ["Policy", "Tape", "run_selectively"]

_TAG = "_hvd_ckpt_dropped"

_STATISTICS = {
    functional.batch_norm: 1,
    functional.instance_norm: 1,
    torch.batch_norm: 3,
    torch.instance_norm: 3,
}
"""Functions that update running statistics without a word to the version counters, and where those stand among the
arguments. Results do not depend on statistics that are updated."""


@dataclass(frozen=True)
class Policy:
    """Which calls of a piece of code are dropped.

    Attributes:
        calls: names of the torch functions it calls that return tensors, in order. Code that calls others on a day (in
            evaluation mode, with another mask) keeps everything from the first difference on.
        dropped: numbers of the calls whose results are dropped.
        breaks: those dropped calls behind which a new group begins: what depends on their results is replayed apart from
            what they depend on.
        compress: keep masks and integers in fewer bytes (:mod:`hvd_ckpt.recompute.saved`).
    """

    calls: tuple[str, ...]
    dropped: frozenset[int]
    breaks: frozenset[int] = frozenset()
    compress: bool = False


class _Tag(NamedTuple):
    """Written on a tensor that is a dropped result; it counts for one tape, and until the tensor is changed."""

    tape: object
    group: Group
    call: Call
    output: int
    version: int


class _Running(NamedTuple):
    """The torch function that is running now."""

    inputs: list[tuple[Tensor, int, _Tag | None]]
    call: Call | None  # None: its results are not dropped
    group: Group | None


@_disable_dynamo
def run_selectively(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Any:
    """``function(*args, **kwargs)``, whose graph keeps what the policy does not drop.

    Without gradients, and inside another selective run, the function simply runs.
    """
    if (
        not (policy.dropped or policy.compress)
        or not torch.is_grad_enabled()
        or any(isinstance(mode, CallMode) for mode in torch.overrides._get_current_function_mode_stack())
    ):
        return function(*args, **kwargs)
    tape = Tape(policy)
    try:
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack), tape:
            result = function(*args, **kwargs)
    finally:
        tape.close()
    for tensor in tensors_in(result):
        tensor.__dict__.pop(_TAG, None)  # who keeps a result must not keep what it was computed from
    return result


class Tape(CallMode):
    """One forward pass of one piece of code."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.keeper = Keeper()
        self._policy = policy
        self._dropped = policy.dropped
        self._count = 0
        self._running: _Running | None = None
        self._crossing: list[tuple[Group, Reference]] = []  # references from one group to another
        self._token = object()

    def close(self) -> None:
        """The forward pass is over."""
        self.keeper.close()
        for group, reference in self._crossing:
            if reference.group is not None and reference.group.root() is group.root():
                reference.group = None  # they have become one after all
        self._crossing.clear()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._count
        inputs = [(tensor, _version(tensor), self._tag(tensor)) for tensor in tensors_in(args, kwargs)]
        call = group = None
        if self._drops(number, func) and self._repeatable(func, args, kwargs, inputs):
            call = Call(func, number, inputs[0][0].device if inputs else torch.device("cpu"))
            group = Group()
            self._begin(call)
        outer, self._running = self._running, _Running(inputs, call, group)
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = outer
        outputs = (result,) if isinstance(result, Tensor) else tuple(tensors_in(result))
        if outputs:
            self._count += 1
            if call is not None and group is not None:
                self._record(call, group, args, kwargs, inputs, outputs)
            elif self._dropped and not self._expected(number, func):
                self._dropped = frozenset()
        return result

    def _begin(self, call: Call) -> None:
        """Called before a call runs whose results may be dropped."""

    def _drops(self, number: int, func: Callable[..., Any]) -> bool:
        return number in self._dropped and self._expected(number, func)

    def _expected(self, number: int, func: Callable[..., Any]) -> bool:
        calls = self._policy.calls
        return number < len(calls) and calls[number] == call_name(func)

    @staticmethod
    def _repeatable(
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[tuple[Tensor, int, _Tag | None]],
    ) -> bool:
        """A change in place can be repeated if what it changes comes back as it was: if that is a dropped result itself."""
        return not in_place(func, args, kwargs) or (bool(inputs) and inputs[0][2] is not None)

    def _tag(self, tensor: Tensor) -> _Tag | None:
        """The tensor's tag, if it is what this tape has dropped."""
        tag: _Tag | None = tensor.__dict__.get(_TAG)
        if tag is None or tag.tape is not self._token or tag.version != _version(tensor):
            return None
        return tag

    def _record(
        self,
        call: Call,
        group: Group,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[tuple[Tensor, int, _Tag | None]],
        outputs: tuple[Tensor, ...],
    ) -> None:
        """Notes what is needed to run the call again, and marks its results as dropped."""
        changed = [entry for entry in inputs if _version(entry[0]) != entry[1]]
        new = [
            (output, tensor)
            for output, tensor in enumerate(outputs)
            if changed or not any(tensor is source for source, _, _ in inputs)
        ]
        if not new and not call.inner:
            return
        scratch = _statistics(call.func, args, kwargs)
        changed = [entry for entry in changed if not any(entry[0] is one for one in scratch)]
        if changed:
            name = call_name(call.func)
            if (
                len(changed) == 1
                and changed[0] is inputs[0]
                and inputs[0][2] is not None
                and outputs[0] is inputs[0][0]
            ):
                call.in_place = True
            elif call.inner:
                raise RuntimeError(
                    f"'{name}' has changed one of its arguments in place, which it did not when the plan was made: make the plan "
                    "anew."
                )
            else:
                return
        specified: dict[int, Stored | Scratch | Reference] = {}
        for tensor, version, tag in inputs:
            if id(tensor) in specified:
                continue
            if any(tensor is one for one in scratch):
                specified[id(tensor)] = Scratch(tensor)
            elif tag is None:
                specified[id(tensor)] = Stored(self.keeper.keep(tensor), tensor.requires_grad, version)
            else:
                reference = Reference(tag.call, tag.output, tensor.requires_grad, None)
                if tag.call.number in self._policy.breaks:
                    reference.group = tag.group
                    self._crossing.append((group, reference))
                else:
                    group.merge(tag.group.root())
                specified[id(tensor)] = reference
        call.args, call.kwargs = map_tensors(lambda tensor: specified[id(tensor)], Tensor, (args, kwargs))
        group.add(call)
        for output, tensor in new:
            tensor.__dict__[_TAG] = _Tag(self._token, group, call, output, _version(tensor))

    def pack(self, tensor: Tensor) -> Any:
        """What autograd is to hold in place of ``tensor``."""
        tag = self._tag(tensor)
        if tag is not None:
            return _hold(tag.group, tag.call, tag.output)
        running = self._running
        if running is None or not tensor.numel():
            return self.keeper.keep(tensor)
        storage = tensor.untyped_storage().data_ptr()
        for source, version, tag in running.inputs:
            if source.untyped_storage().data_ptr() == storage and _version(source) == version:
                if tag is None or tensor.dtype != source.dtype or tensor.is_conj() or tensor.is_neg():
                    return self.keeper.keep(tensor)
                view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
                return _hold(tag.group, tag.call, tag.output, view)
        if running.call is None or running.group is None:
            return self._keep_inner(tensor)
        running.call.inner += 1
        return _hold(running.group, running.call, -running.call.inner)

    def _keep_inner(self, tensor: Tensor) -> Any:
        """Keeps a tensor that a call has made and nobody else has seen yet."""
        if self._policy.compress and not self.keeper.collecting:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                packed = compress(tensor)
            if packed is not None:
                return packed
        return self.keeper.keep(tensor)


def _statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    first = _STATISTICS.get(func)
    if first is None:
        return []
    found = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _hold(group: Group, call: Call, key: int, view: View | None = None) -> Holder:
    call.wanted[key] = call.wanted.get(key, 0) + 1
    return Holder(group, call, key, view)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
