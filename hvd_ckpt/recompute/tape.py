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

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from hvd_ckpt.recompute.calls import (
    UNREPEATABLE,
    UNTRACKED,
    call_name,
    changed_by,
    depends_on_arguments_alone,
    map_tensors,
    statistics_of,
    tensors_in,
)
from hvd_ckpt.recompute.host import HostTensors, may_leave
from hvd_ckpt.recompute.keeper import Keeper, Later, Packed, memory_of, version_of
from hvd_ckpt.recompute.replay import Call, Group, Holder, Reference, Scratch, Stored, View, unpack
from hvd_ckpt.recompute.saved import compress
from hvd_ckpt.recompute.transforms import refuse_transforms
from hvd_ckpt.recompute.verify import Verification, begin_pass, observe, running_module
from hvd_ckpt.recompute.written import SMALL_BYTES
from hvd_ckpt.torch_private import DisableTorchFunction, disable_dynamo, function_mode_stack, in_functorch
from hvd_ckpt.utils.frames import depth, keeps_everything
from hvd_ckpt.utils.measure import is_undisturbed

_TAG = "_hvd_ckpt_dropped"
_MADE = "_hvd_ckpt_made"


@dataclass(frozen=True)
class Policy:
    """Which calls of a piece of code are dropped.

    Attributes:
        calls: names of the torch functions it calls that return tensors, in order. Code that sometimes calls others
            (in evaluation mode, with another mask) keeps everything from the first difference on.
        dropped: numbers of the calls whose results are dropped.
        breaks: those dropped calls behind which a new group begins: what depends on their results is replayed apart from
            what they depend on.
        compress: keep masks and integers in fewer bytes (:mod:`hvd_ckpt.recompute.saved`).
        lossy: keep floating point numbers that are made here as ``"float16"`` or ``"bfloat16"``: results change.
        offload: keep large tensors of a CUDA device that are made here in host memory (:mod:`hvd_ckpt.recompute.host`).
    """

    calls: tuple[str, ...]
    dropped: frozenset[int]
    breaks: frozenset[int] = frozenset()
    compress: bool = False
    lossy: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.lossy not in (None, "float16", "bfloat16"):
            raise ValueError(f"lossy must be 'float16' or 'bfloat16', got {self.lossy!r}")

    @property
    def acts(self) -> bool:
        """Whether it does anything."""
        return bool(self.dropped) or self.compress or self.lossy is not None or self.offload


class _Tag(NamedTuple):
    """Written on a tensor that is a dropped result; it counts for one tape, and until the tensor is changed."""

    tape: object
    group: Group
    call: Call
    output: int
    version: int
    fresh: bool  # lies in memory that dropped calls have made


_Inputs = list[tuple[Tensor, int, _Tag | None]]  # each tensor, its version before the call, and its tag


class _Running(NamedTuple):
    """The torch function that is running now."""

    func: Callable[..., Any]
    inputs: _Inputs
    call: Call | None  # None: its results are not dropped
    group: Group | None
    inner: list[Tensor]  # what it has saved of its own, where that may have to be kept after all
    after: list[
        Callable[[], object]
    ]  # to be called when it has returned: until then it may fill what it saves


@disable_dynamo
def run_selectively(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Any:
    """``function(*args, **kwargs)``, whose graph keeps what the policy does not drop.

    Without gradients, inside another selective run, and where everything is kept
    (:func:`hvd_ckpt.without_recomputation`), the function simply runs.
    """
    if (
        not policy.acts
        or not torch.is_grad_enabled()
        or keeps_everything()
        or any(
            isinstance(mode, Tape) and mode.depth == depth()
            for mode in function_mode_stack()  # type: ignore[no-untyped-call]
        )
    ):
        return function(*args, **kwargs)
    refuse_transforms(function, args, kwargs)
    tape = Tape(policy, _verification(function, policy))
    try:
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack), tape:
            result = function(*args, **kwargs)
    finally:
        tape.close()
    return result


def _verification(function: Callable[..., Any], policy: Policy) -> Verification | None:
    """What compares dropped results with those that come back, in a pass through the function that is to be verified."""
    owner: Any = function
    while isinstance(
        owner, functools.partial
    ):  # a method of a module, or modules that are called one after the other
        owner = owner.args[0] if owner.args else owner.func
        owner = owner[0] if isinstance(owner, list) else owner
    owner = getattr(owner, "__self__", owner)
    # Planning looks at copies of inputs: training is verified again.
    key = (id(policy), getattr(owner, "training", None), is_undisturbed())
    title = getattr(owner, "__qualname__", type(owner).__name__)
    return begin_pass(owner, key, lambda: title, may_verify=policy.lossy is None).verification


class Tape(TorchFunctionMode):
    """One forward pass of one piece of code. While it is active on a thread, :meth:`call` runs every torch function that the
    thread's code calls.

    Not within a region that is checkpointed as a whole: what that keeps is already decided.

    Calls that return tensors are numbered: what is done to one of them must be done to the same one in the next step.
    """

    def __init__(self, policy: Policy, verification: Verification | None = None) -> None:
        super().__init__()
        self._verification = verification
        self.depth = depth()
        self.keeper = Keeper()
        self._lossy: torch.dtype | None = getattr(torch, policy.lossy) if policy.lossy else None
        self._policy = policy
        self._compresses = policy.compress or policy.lossy is not None
        self._host = HostTensors() if policy.offload else None
        self._dropped = policy.dropped
        self._count = 0
        self._running: _Running | None = None
        self._tagged: list[TensorWeakRef] = []
        self._stored: dict[int, list[tuple[weakref.ref[Stored], Call]]] = {}  # by memory
        self._written: set[int] = (
            set()
        )  # memory of small tensors that calls change: the next forward pass may change them again
        self._token = object()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # What torch.compile compiles is one piece: it would look into this method otherwise. And a transform of torch.func
        # works at a level of its own, which a replay is not at.
        if torch.compiler.is_compiling() or depth() != self.depth or in_functorch():
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def close(self) -> None:
        """The forward pass is over."""
        for memory in self._written:
            self._copy_stored(memory)
        self.keeper.close()
        self._stored.clear()
        for reference in self._tagged:
            tensor = reference()
            if tensor is not None:  # whoever keeps a result must not keep what it was computed from
                tensor.__dict__.pop(_TAG, None)
                tensor.__dict__.pop(_MADE, None)
        self._tagged.clear()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``func(*args, **kwargs)`` and returns what it returns."""
        number = self._count
        inputs = [(tensor, version_of(tensor), self._tag(tensor)) for tensor in tensors_in(args, kwargs)]
        needs_grad = [tensor.requires_grad for tensor, _, _ in inputs]
        self._protect(func, args, kwargs)
        call = group = None
        if self._drops(number, func) and self._repeatable(func, args, kwargs, inputs):
            call = Call(func, number, [tensor for tensor, _, _ in inputs])
            group = Group()
            self._begin(call)
        running = _Running(func, inputs, call, group, [], [])
        outer, self._running = self._running, running
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = outer
        outputs = (result,) if isinstance(result, Tensor) else tuple(tensors_in(result))
        for finish in running.after:
            finish()
        if call is not None:
            call.ran()
            if not outputs:
                call.keep(running.inner)
        if outputs:
            self._count += 1
            if call is not None and group is not None:
                self._record(call, group, args, kwargs, running, needs_grad, outputs)
            elif self._dropped and not self._expected(number, func):
                self._dropped = frozenset()
            if self._lossy is not None or self._host is not None:
                self._mark(inputs, outputs)
        return result

    def _mark(self, inputs: _Inputs, outputs: tuple[Tensor, ...]) -> None:
        """Marks results in memory of their own: those may be kept in another form when another call saves them."""
        sources = {memory_of(tensor) for tensor, _, _ in inputs}
        for tensor in outputs:
            if memory_of(tensor) not in sources:
                tensor.__dict__[_MADE] = self._token
                self._tagged.append(TensorWeakRef(tensor))

    def _may_keep(self, func: Callable[..., Any]) -> bool:
        """Whether what a call saves may have to be kept, because it changes its arguments without saying so."""
        return not depends_on_arguments_alone(func)

    def _begin(self, call: Call) -> None:
        """Called before a call runs whose results may be dropped; for subclasses (``planning.trace``)."""

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
        inputs: _Inputs,
    ) -> bool:
        """Whether the call does the same when it is run again with the same arguments.

        A change in place of the first argument does if that comes back as it was: in memory that dropped calls have made.
        """
        if func in UNREPEATABLE or any(
            isinstance(value, torch.Generator) for value in (*args, *kwargs.values())
        ):
            return False
        changed = changed_by(func, args, kwargs)
        if not changed:
            return True
        first, _, tag = inputs[0]
        return all(tensor is first for tensor in changed) and tag is not None and tag.fresh

    def _tag(self, tensor: Tensor) -> _Tag | None:
        """The tensor's tag, if it is what this tape has dropped."""
        tag: _Tag | None = tensor.__dict__.get(_TAG)
        if tag is None or tag.tape is not self._token or tag.version != version_of(tensor):
            return None
        return tag

    def _protect(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a call runs: if it changes kept arguments of dropped calls in place, those get copies."""
        if func in UNTRACKED:
            for tensor in tensors_in(args):
                tensor.__dict__.pop(_TAG, None)
        for tensor in changed_by(func, args, kwargs):
            memory = memory_of(tensor) or 0
            self._copy_stored(memory)
            if memory and tensor.nbytes <= SMALL_BYTES and not tensor.requires_grad:
                self._written.add(memory)

    def _copy_stored(self, memory: int) -> None:
        """Gives copies to dropped calls whose kept arguments lie in this memory."""
        for reference, call in self._stored.pop(memory, ()):
            stored = reference()
            if (
                stored is None or (memory_of(stored.kept.peek()) or 0) != memory
            ):  # a split parameter has left it
                continue
            # A view that nobody has used yet has changed too, and will not be asked for.
            if call.read or call.wanted or not call.alias:
                with torch.no_grad():
                    copy = stored.kept.peek().clone()
                stored.kept = self.keeper.keep(copy, call_name(call.func))

    def _record(
        self,
        call: Call,
        group: Group,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        running: _Running,
        needs_grad: list[bool],
        outputs: tuple[Tensor, ...],
    ) -> None:
        """Notes what is needed to run the call again, and marks its results as dropped."""
        inputs = running.inputs
        changed = [entry for entry in inputs if version_of(entry[0]) != entry[1]]
        new = [
            (output, tensor)
            for output, tensor in enumerate(outputs)
            if changed or not any(tensor is source for source, _, _ in inputs)
        ]
        if not new and not call.inner:
            return
        name = call_name(call.func)
        scratch = statistics_of(call.func, args, kwargs)
        changed = [entry for entry in changed if not any(entry[0] is statistic for statistic in scratch)]
        if changed:
            if (
                len(changed) == 1
                and changed[0] is inputs[0]
                and inputs[0][2] is not None
                and outputs[0] is inputs[0][0]
            ):
                call.in_place = True
            else:
                call.keep(running.inner)
                return
        specified: dict[int, Stored | Scratch | Reference] = {}
        foreign: set[int | None] = set()
        for (tensor, _, tag), requires_grad in zip(inputs, needs_grad):
            if tag is None or not tag.fresh:
                foreign.add(memory_of(tensor))
            if id(tensor) in specified:
                continue
            if any(tensor is statistic for statistic in scratch):
                specified[id(tensor)] = Scratch(tensor)
            elif tag is None:
                specified[id(tensor)] = stored = Stored(self.keeper.keep(tensor, name), requires_grad)
                self._stored.setdefault(memory_of(tensor) or 0, []).append((weakref.ref(stored), call))
            else:
                tag.call.read = True
                if tag.call.number not in self._policy.breaks:
                    group.merge(tag.group.root())
                specified[id(tensor)] = Reference(tag.call, tag.output, requires_grad)
        call.args, call.kwargs = map_tensors(lambda tensor: specified[id(tensor)], Tensor, (args, kwargs))
        group.add(call)
        for output, tensor in new:
            fresh = memory_of(tensor) not in foreign
            call.alias = call.alias or not fresh
            tensor.__dict__[_TAG] = _Tag(self._token, group, call, output, version_of(tensor), fresh)
            self._tagged.append(TensorWeakRef(tensor))

    def pack(self, tensor: Tensor) -> Any:
        """The object that autograd holds in place of ``tensor``."""
        tag = self._tag(tensor)
        if tag is not None:
            return self._see(_hold(tag.group, tag.call, tag.output), tensor)
        running = self._running
        if running is None:
            return self.keeper.keep(tensor, "a custom autograd function")
        name = call_name(running.func)
        if not tensor.numel():
            return self.keeper.keep(tensor, name)
        memory = memory_of(tensor)
        for source, version, tag in running.inputs:
            same = source is tensor or (memory is not None and memory_of(source) == memory)
            if same and version_of(source) == version:
                # An argument, or a view of it: kept, unless it is a dropped result that a replay gives back in the same memory
                # layout (what comes back through hooks of others may lie in less memory than it did).
                can_be_viewed = tag is not None and (tag.fresh or not self.keeper.collecting)
                if (
                    tag is None
                    or not can_be_viewed
                    or tensor.dtype != source.dtype
                    or tensor.is_conj()
                    or tensor.is_neg()
                ):
                    made_here = source is tensor and tensor.__dict__.get(_MADE) is self._token
                    if made_here and self._moves:
                        return self._keep_inner(tensor, running)
                    return self.keeper.keep(tensor, name)
                return self._see(_hold(tag.group, tag.call, tag.output, View.of(tensor, source)), tensor)
        if running.call is None or running.group is None:
            return self._keep_inner(tensor, running)
        running.call.inner += 1  # a new tensor of the running call, its inner tensor number -inner
        if self._may_keep(running.func):
            running.inner.append(tensor)
        holder = _hold(running.group, running.call, -running.call.inner)
        if self._verification is not None:
            running.after.append(functools.partial(self._see, holder, tensor))
        return holder

    def _see(self, holder: Holder, tensor: Tensor) -> Holder:
        """The holder of a tensor, which observes it in a pass that is verified."""
        if self._verification is not None:
            holder.seen = (self._verification, observe(tensor, running_module()))
        return holder

    def _keep_inner(self, tensor: Tensor, running: _Running) -> Any:
        """Keeps a new tensor of the running call, perhaps in fewer bytes or in host memory."""
        name = call_name(running.func)
        if not self._moves:
            return self.keeper.keep(tensor, name)
        later = Later(tensor, name)
        running.after.append(lambda: setattr(later, "packed", self._moved(tensor, name)))
        return later

    @property
    def _moves(self) -> bool:
        """Whether tensors that are made here may be kept in another form than their own."""
        return self._compresses or self._host is not None

    def _moved(self, tensor: Tensor, name: str) -> Any:
        """What is kept of a tensor that is complete."""
        packed = None
        if self._compresses:
            with DisableTorchFunction(), torch.no_grad():
                packed = compress(tensor, self._lossy)
        elif self._host is not None and not self.keeper.collecting and may_leave(tensor):
            return self._host.take(tensor)
        if packed is None:
            return self.keeper.keep(tensor, name)
        if self.keeper.collecting:
            return Packed(packed, self.keeper.keep(packed.payload, name))
        return packed


def _hold(group: Group, call: Call, key: int, view: View | None = None) -> Holder:
    call.wanted[key] = call.wanted.get(key, 0) + 1
    return Holder(group, call, key, view)
