"""Selective recomputation of single torch functions, in code that stays as it is.

A region that is recomputed as a whole (:func:`hvd_ckpt.checkpoint`) drops both cheap and expensive results. Here a function runs
once, unchanged, under a *tape*: a torch function mode that sees each torch function that the code calls. A :class:`Policy` names
some of these calls by their numbers. Their results are *dropped*: where autograd would save such a result, it saves a small
:class:`.replay.Holder` instead. The first holder that the backward pass opens *replays* its group: the dropped calls that are
connected with it run again, from kept tensors. So a policy can drop the result of a gelu, which is cheap to compute again, and
keep the result of a matrix product.

A replay runs torch functions only: no module code, no hooks, no side effects. A batch norm counts its batch once, because its
module runs once. The graph is the one that autograd built in the forward pass, so each parameter's gradient accumulates once.

Some results cannot be dropped. These are results of custom autograd functions and of compiled functions, which the tape does not
see, of functions in :data:`.calls.UNREPEATABLE`, of calls that are given something else than tensors and constants (a generator, an
array, a function), and of calls that change a tensor in place and cannot be repeated. Checkmate (Jain et al., 2020) and Rockmate
(Zhao et al., 2023) also keep some tensors of a block and recompute others. They trace the model into a graph and run the graph in
its place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from hvd_ckpt.recompute.calls import (
    UNREPEATABLE,
    UNTRACKED,
    call_name,
    changed_by,
    changes_nothing,
    depends_on_arguments_alone,
    draws,
    is_known,
    map_tensors,
    running_statistics,
    statistics_of,
    tensors_in,
)
from hvd_ckpt.recompute.environment import Environment
from hvd_ckpt.recompute.keeper import Keeper, memory_of, version_of
from hvd_ckpt.recompute.masks import Recording
from hvd_ckpt.recompute.reach import refuse_transforms
from hvd_ckpt.recompute.replay import Call, Group, Holder, Reference, Scratch, Stored, View, unpack
from hvd_ckpt.recompute.verify import Verification, begin_pass, naming_modules, observe_all, running_module
from hvd_ckpt.recompute.written import SMALL_BYTES
from hvd_ckpt.utils.frames import depth, keeps_everything
from hvd_ckpt.utils.measure import is_undisturbed
from hvd_ckpt.utils.torch_private import disable_dynamo, function_mode_stack, in_functorch

_TAG = "_hvd_ckpt_dropped"


@dataclass(frozen=True)
class Policy:
    """The calls of a function that are dropped, and the format in which the tensors of the others are kept.

    Attributes:
        calls: names of the torch functions that the code calls and that return tensors, in order. If a pass calls other functions
            (in evaluation mode, with another mask), everything from the first difference on is kept.
        dropped: numbers of the calls whose results are dropped.
        breaks: dropped calls that end a group. The calls that depend on their results are replayed apart from the calls that they
            depend on, which takes less memory and more time.
        compress: keep masks of kept calls as bits (:mod:`hvd_ckpt.recompute.saved`).
        redraw: draw the random masks of dropped calls again, in place of keeping them as bits (:mod:`hvd_ckpt.recompute.masks`),
            which takes less memory and more time.
    """

    calls: tuple[str, ...]
    dropped: frozenset[int]
    breaks: frozenset[int] = frozenset()
    compress: bool = False
    redraw: bool = False

    @property
    def acts(self) -> bool:
        """Whether the policy changes what is kept."""
        return bool(self.dropped) or self.compress


class _Tag(NamedTuple):
    """Mark on a tensor that is a dropped result. It is valid for one tape and until the tensor is changed in place."""

    tape: object
    group: Group
    call: Call
    output: int
    version: int
    fresh: bool  # the result lies in memory that dropped calls have allocated


class _Input:
    """A tensor among the arguments of a call, as it was before the call.

    A version that has grown afterwards shows a change in place, which may also have made the tensor require a gradient.
    """

    __slots__ = ("_memory", "requires_grad", "tag", "tensor", "version")

    def __init__(self, tensor: Tensor, tag: _Tag | None) -> None:
        self.tensor, self.tag = tensor, tag
        self.version, self.requires_grad = version_of(tensor), tensor.requires_grad
        self._memory: int | None = -1  # not known yet

    @property
    def memory(self) -> int | None:
        """The address of its memory."""
        if self._memory == -1:
            self._memory = memory_of(self.tensor)
        return self._memory


class _Running:
    """The torch function that is running.

    Attributes:
        may_change: whether it may change its arguments in place.
        inputs: None until they are needed, for a function that changes none of them.
        call, group: None if its results are not dropped.
        inner: new tensors that it has saved, and may have to keep.
        after: callbacks for the time when it has filled what it has saved.
    """

    __slots__ = ("after", "args", "call", "func", "group", "inner", "inputs", "kwargs", "may_change", "name")

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # For each torch function of a block, so nothing is made here that most do not need.
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = call_name(func)
        self.may_change = "out" in kwargs or not changes_nothing(func)
        self.inputs: list[_Input] | None = None
        self.call: Call | None = None
        self.group: Group | None = None
        self.inner: list[Tensor] | None = None
        self.after: list[Callable[[], object]] | None = None

    def then(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` when the function has returned."""
        self.after = [callback] if self.after is None else [*self.after, callback]


@disable_dynamo
def run_selectively(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Any:
    """Runs ``function(*args, **kwargs)`` so that its graph keeps only what the policy does not drop.

    The function runs as it is without gradients, inside another selective run, and under
    :func:`hvd_ckpt.without_recomputation`.
    """
    if (
        not policy.acts
        or not torch.is_grad_enabled()
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or keeps_everything()
        or any(
            isinstance(mode, Tape) and mode.depth == depth()
            for mode in function_mode_stack()  # type: ignore[no-untyped-call]
        )
    ):
        return function(*args, **kwargs)
    refuse_transforms(function, args, kwargs)
    verification = _verification(function, policy)
    tape = Tape(policy, verification)
    naming = nullcontext() if verification is None else naming_modules()
    try:
        with naming, torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack), tape:
            result = function(*args, **kwargs)
        tape.copy_written()
    finally:
        tape.close()
    return result


def _verification(function: Callable[..., Any], policy: Policy) -> Verification | None:
    """Verification that compares dropped results with replayed ones; None if this pass through the function is not verified."""
    owner: Any = function
    # A method of a module, or modules that run one after the other.
    while isinstance(owner, functools.partial):
        owner = owner.args[0] if owner.args else owner.func
        owner = owner[0] if isinstance(owner, list) else owner
    owner = getattr(owner, "__self__", owner)
    # Planning runs the function on copies of inputs, which does not count as the first pass of training.
    # The policy itself and not its id, which a later policy of this function may get again.
    key = (policy, getattr(owner, "training", None), is_undisturbed(), Environment().key)
    title = getattr(owner, "__qualname__", type(owner).__name__)
    return begin_pass(owner, key, lambda: title)[1]


class Tape(TorchFunctionMode):
    """Tape of one forward pass of a function. While it is active, :meth:`call` runs each torch function that this thread calls.

    The tape is inactive inside a region that is checkpointed as a whole, since that region decides what it keeps.

    Calls that return tensors are numbered, and a policy names a call by its number in each step.
    """

    def __init__(self, policy: Policy, verification: Verification | None = None) -> None:
        super().__init__()
        self._verification = verification
        self.depth = depth()
        self.keeper = Keeper(policy.compress)
        self._policy = policy
        self._dropped = policy.dropped
        self._count = 0
        self._running: _Running | None = None
        self._tagged: list[TensorWeakRef] = []
        self._stored: dict[int, list[tuple[weakref.ref[Stored], Call]]] = {}  # by memory
        # Memory of small tensors that calls change: the next forward pass may change them again before this backward pass. Where it
        # has been freed, its address is another tensor's.
        self._written: dict[int, StorageWeakRef] = {}
        self._environment: Environment | None = None  # of the last dropped call
        self._token = object()  # tells this tape's marks on tensors from those of earlier tapes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Three kinds of calls are not recorded: those that torch.compile is tracing (it would trace into this method), those of a
        # checkpointed region inside, and those of a torch.func transform, whose level has ended when a replay runs.
        if torch.compiler.is_compiling() or depth() != self.depth or in_functorch():
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def copy_written(self) -> None:
        """Copies kept arguments in small tensors that calls have changed; called at the end of a forward pass that has come to it.

        An error ends it before: that of an outer region's recomputation, which has all the tensors that it needs, among them.
        """
        for memory, storage in self._written.items():
            if not storage.expired():  # type: ignore[no-untyped-call]
                self._copy_stored(memory)

    def close(self) -> None:
        """Ends the forward pass: removes all marks."""
        self.keeper.close()
        self._stored.clear()
        for reference in self._tagged:
            tensor = reference()
            if tensor is not None:
                # A mark holds its group and so the group's kept arguments. A result that outlives the graph must not hold them.
                tensor.__dict__.pop(_TAG, None)
        self._tagged.clear()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``func(*args, **kwargs)``, records the call if its results are dropped, and returns what it returns."""
        number = self._count
        running = _Running(func, args, kwargs)
        drops = self._drops(number, running.name)
        if drops or running.may_change:
            running.inputs = self._inputs(args, kwargs)
            if running.may_change:
                self._protect(func, args, kwargs)
            if drops and self._repeatable(running, running.inputs):
                running.call = Call.begun(
                    func, number, [given.tensor for given in running.inputs], self._environment
                )
                running.group = Group()
                self._environment = running.call.environment
                self._begin(running.call)
        outer, self._running = self._running, running
        records = running.call is not None and not self._policy.redraw and draws(func)
        recording = Recording() if records else None
        try:
            with recording or nullcontext():
                result = func(*args, **kwargs)
        finally:
            self._running = outer
        outputs = [result] if isinstance(result, Tensor) else tensors_in(result)
        for finish in running.after or ():
            finish()
        if running.call is not None:
            self._end(running.call, recording)
            if not outputs:
                running.call.keep(running.inner or ())
        if outputs:
            self._count += 1
            if running.call is not None:
                self._record(running, outputs)
            elif self._dropped and not self._expected(number, running.name):
                # The code calls other functions than those that the policy was made for, so later numbers mean other calls.
                self._dropped = frozenset()
        return result

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Input]:
        return [_Input(tensor, self._tag(tensor)) for tensor in tensors_in(*args, *kwargs.values())]

    def _begin(self, call: Call) -> None:
        """Called before a droppable call runs; for subclasses (``planning.trace``)."""

    def _end(self, call: Call, recording: Recording | None) -> None:
        """Called when a dropped call has run."""
        call.ran(recording, self.keeper)

    def _drops(self, number: int, name: str) -> bool:
        return number in self._dropped and self._expected(number, name)

    def _expected(self, number: int, name: str) -> bool:
        calls = self._policy.calls
        return number < len(calls) and calls[number] == name

    @staticmethod
    def _repeatable(running: _Running, inputs: list[_Input]) -> bool:
        """Whether the call gives the same results when it runs again with the same arguments.

        A call that changes its first argument in place is repeatable if a replay allocates that argument again, that is, if it
        lies in memory that dropped calls have allocated.
        """
        func, args, kwargs = running.func, running.args, running.kwargs
        if func in UNREPEATABLE or not is_known(args) or not is_known(kwargs):
            return False
        changed = changed_by(func, args, kwargs) if running.may_change else []
        if not changed:
            return True
        first, tag = inputs[0].tensor, inputs[0].tag
        return all(tensor is first for tensor in changed) and tag is not None and tag.fresh

    def _tag(self, tensor: Tensor) -> _Tag | None:
        """The tag of a tensor that is a dropped result of this tape and has not changed since; else None."""
        tag: _Tag | None = tensor.__dict__.get(_TAG)
        if tag is None or tag.tape is not self._token or tag.version != version_of(tensor):
            return None
        return tag

    def _protect(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies kept arguments of dropped calls that the next call is going to change in place, or past their version counters."""
        if func in UNTRACKED:
            for tensor in tensors_in(args):
                tensor.__dict__.pop(_TAG, None)
        changed = changed_by(func, args, kwargs)
        for tensor in (*changed, *statistics_of(func, args, kwargs)):
            self._copy_stored(memory_of(tensor) or 0)
        # Running statistics that are read here may be updated in the next pass.
        for tensor in (*changed, *running_statistics(func, args, kwargs)):
            memory = memory_of(tensor) or 0
            if memory and tensor.nbytes <= SMALL_BYTES and not tensor.requires_grad:
                self._written[memory] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _copy_stored(self, memory: int) -> None:
        """Replaces kept arguments of dropped calls that lie in this memory by copies."""
        for reference, call in self._stored.pop(memory, ()):
            stored = reference()
            # A parameter that is split over the ranks may have left the memory since.
            if stored is None or (memory_of(stored.kept.peek()) or 0) != memory:
                continue
            # No copy for a call whose result lies in the changed memory and was neither read nor saved: the change makes that
            # result invalid, so nobody can ask for its old values.
            if call.read or call.wanted or not call.alias:
                with torch.no_grad():
                    copy = stored.kept.peek().clone()
                stored.kept = self.keeper.keep(copy, call_name(call.func))

    def _record(self, running: _Running, outputs: list[Tensor]) -> None:
        """Notes what is needed to run the call again, and marks its results as dropped."""
        # A call that has run changes nothing, or running statistics (which a replay updates in scratch copies), or its first
        # argument, if it returns that and it is a dropped result itself. Whatever else it has changed, its results are kept.
        call, group, inputs = running.call, running.group, running.inputs
        assert call is not None and group is not None and inputs is not None
        may_change = running.may_change
        changed = (
            [given for given in inputs if version_of(given.tensor) != given.version] if may_change else []
        )
        sources = {id(given.tensor) for given in inputs}
        new = [
            (output, tensor) for output, tensor in enumerate(outputs) if changed or id(tensor) not in sources
        ]
        if not new and not call.inner:
            return
        scratch = statistics_of(call.func, running.args, running.kwargs) if may_change else []
        changed = [given for given in changed if not any(given.tensor is statistic for statistic in scratch)]
        if changed:
            first = inputs[0]
            if changed == [first] and first.tag is not None and outputs[0] is first.tensor:
                call.in_place = True
            else:
                call.keep(running.inner or ())
                return
        specified: dict[int, Stored | Scratch | Reference] = {}
        # Memory that a replay finds and does not allocate: of kept arguments, and of results that lie in it. A result in it is
        # not fresh, so that a later call which changes it in place cannot be dropped.
        foreign: set[int | None] = set()
        for given in inputs:
            tensor, tag = given.tensor, given.tag
            if id(tensor) in specified:
                continue
            if tag is None or not tag.fresh:
                foreign.add(given.memory)
            if scratch and any(tensor is statistic for statistic in scratch):
                specified[id(tensor)] = Scratch(tensor)
            elif tag is None:
                stored = Stored(self.keeper.keep(tensor, running.name), given.requires_grad)
                specified[id(tensor)] = stored
                self._stored.setdefault(given.memory or 0, []).append((weakref.ref(stored), call))
            else:
                # The argument is a dropped result: the two calls are replayed together, except across a break.
                tag.call.read = True
                if tag.call.number not in self._policy.breaks:
                    group.merge(tag.group.root())
                specified[id(tensor)] = reference = Reference(tag.call, tag.output, given.requires_grad)
                call.references.append(reference)
        call.args = map_tensors(lambda tensor: specified[id(tensor)], Tensor, running.args)
        call.kwargs = map_tensors(lambda tensor: specified[id(tensor)], Tensor, running.kwargs)
        group.calls.append(call)
        for output, tensor in new:
            fresh = memory_of(tensor) not in foreign
            call.alias = call.alias or not fresh
            tensor.__dict__[_TAG] = _Tag(self._token, group, call, output, version_of(tensor), fresh)
            self._tagged.append(TensorWeakRef(tensor))

    def pack(self, tensor: Tensor) -> Any:
        """The object that autograd holds in place of ``tensor``."""
        # What autograd saves is one of three things, told apart by identity, memory and version:
        #
        #   a dropped result                          a holder
        #   an argument of the running call, or       kept; if the argument is a dropped result, a holder with the place
        #   a view of one                             of the view
        #   a new tensor of the running call, such    if the call is dropped, a holder for its inner tensor -1, -2, ...;
        #   as a mask                                 else kept, perhaps in another form
        tag = self._tag(tensor)
        if tag is not None:
            return self._see(_hold(tag.group, tag.call, tag.output), tensor)
        running = self._running
        if running is None:
            return self.keeper.keep(tensor, "a custom autograd function")
        name = running.name
        if not tensor.numel():
            return self.keeper.keep(tensor, name)
        if running.inputs is None:
            if any(value is tensor for value in running.args):
                return self.keeper.keep(tensor, name)
            running.inputs = self._inputs(running.args, running.kwargs)
        memory: int | None = -1  # not known yet
        for given in running.inputs:
            source, tag = given.tensor, given.tag
            if source is not tensor:
                memory = memory_of(tensor) if memory == -1 else memory
                if memory is None or given.memory != memory:
                    continue
            if version_of(source) == given.version:
                # The place of a view is only valid if a replay returns the result in the same memory layout. A result that is a
                # view of a kept tensor may not, if that tensor passes through other hooks, which may return it in less memory.
                can_be_viewed = tag is not None and (tag.fresh or not self.keeper.collecting)
                if (
                    tag is None
                    or not can_be_viewed
                    or tensor.dtype != source.dtype
                    or tensor.is_conj()
                    or tensor.is_neg()
                ):
                    return self.keeper.keep(tensor, name)
                return self._see(_hold(tag.group, tag.call, tag.output, View.of(tensor, source)), tensor)
        if running.call is None or running.group is None:
            return self.keeper.keep_new(tensor, name, running.then)
        running.call.inner += 1
        if not depends_on_arguments_alone(running.func):  # it may change its arguments past its schema
            running.inner = [*(running.inner or ()), tensor]
        holder = _hold(running.group, running.call, -running.call.inner)
        if self._verification is not None:
            running.then(functools.partial(self._see, holder, tensor))
        return holder

    def _see(self, holder: Holder, tensor: Tensor) -> Holder:
        """Returns the holder; in a verified pass, first notes how the tensor looks."""
        if self._verification is not None:
            (seen,) = observe_all([(tensor, running_module(), None)])
            holder.seen = (self._verification, seen)
        return holder


def _hold(group: Group, call: Call, key: int, view: View | None = None) -> Holder:
    call.wanted[key] = call.wanted.get(key, 0) + 1
    return Holder(group, call, key, view)
