"""Policies and costs of one block of each kind, measured by itself.

A trace of the block gives candidate policies. Those that give the right bits are measured.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.blocks import FoundBlock
from hvd_ckpt.planning.candidates import candidates
from hvd_ckpt.planning.chain import Block, Choice
from hvd_ckpt.planning.inputs import copied, fingerprints, in_words, left_by, tensors_of
from hvd_ckpt.planning.policy import KEEP, RECOMPUTE, CheckpointPolicy
from hvd_ckpt.planning.step import Step
from hvd_ckpt.planning.trace import Trace, fastest, trace
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.measure import no_collection, now, undisturbed
from hvd_ckpt.utils.memory import recording_marks

_MANY_KINDS = 12  # with more kinds of blocks, fewer policies of each kind are measured
# The time to measure seconds in: of each kind of blocks at most, and of all kinds together if they are many. Each policy runs three
# times at least.
_SECONDS_PER_KIND = 1.5
_SECONDS = 12.0
NOTHING = Block((Choice(0.0, 0, 0, 0, policy=KEEP),), 0, 0.0, 0)
"""A block without costs, which is kept whole."""


class KindProfiler:
    """Measures one block of each kind by itself.

    Args:
        step: the step of the model.
        kinds: the number of kinds.

    Attributes:
        notes: by kind, why its choices are limited.
        alone: kinds of blocks that are in no segment.
    """

    def __init__(self, step: Step, kinds: int) -> None:
        self.notes: dict[int, str] = {}
        self.alone: set[int] = set()
        self._step = step
        self._most_policies = 4 if kinds > _MANY_KINDS else 8
        self._least_seconds = min(_SECONDS_PER_KIND, _SECONDS / max(kinds, 1))
        # By the form of the calls of a block: whether two runs from the same state give the same bits. With a policy: what is wrong
        # with it, or None.
        self._repeats: dict[object, bool] = {}
        self._problems: dict[tuple[object, CheckpointPolicy], str | None] = {}

    def measure(self, block: FoundBlock) -> Block:
        """The costs of a block under each of its policies. A block that cannot be run by itself is kept whole, with costs of 0."""
        if block.obstacle is None:
            try:
                return self._measure_alone(block)
            except Exception as error:
                block.obstacle = f"it cannot be run by itself ({in_words(error)})"
        self.notes[block.like] = f"kept whole, and in no segment: {block.obstacle}"
        self.alone.add(block.like)
        return NOTHING

    def _policies(self, block: FoundBlock, runner: BlockRunner) -> list[CheckpointPolicy]:
        """The policies under which a block gives the same bits as without a policy.

        These are "keep" and policies that drop results of calls, or "recompute" if the calls of the block cannot be seen.
        """
        traced = None if block.compiled else self._traced(block, runner)

        @functools.cache
        def expected() -> list[int]:
            return runner.outcome(KEEP, block.modules)

        # Kinds of blocks that make the same calls on tensors of other sizes, such as the layers of a DenseNet, are checked once.
        # All are checked again in the model.
        form = traced.form if isinstance(traced, Trace) else block.like
        if form not in self._repeats:
            self._repeats[form] = runner.outcome(KEEP, block.modules) == expected()
        repeats = self._repeats[form]

        def problem(policy: CheckpointPolicy) -> str | None:
            key = form, policy
            if key not in self._problems:
                try:
                    # Bits tell nothing if the block does not repeat its own: then it only has to run.
                    right = runner.outcome(policy, block.modules) == expected() or not repeats
                    self._problems[key] = None if right else "gives other values"
                except Exception as error:
                    self._problems[key] = f"fails ({in_words(error)})"
            return self._problems[key]

        whole = problem(RECOMPUTE)
        reason = "it gives other values in each run" if not repeats else None
        if whole:
            reason = f"recomputing it {whole}"
        if reason:
            self.alone.add(block.like)
        offered = candidates(traced, self._most_policies)[1:] if isinstance(traced, Trace) else []
        found = {policy: problem(policy) for policy in offered}
        right = [KEEP, *(policy for policy, wrong in found.items() if wrong is None)]
        wrong = [traced] if isinstance(traced, str) else [*filter(None, found.values())]
        note = reason and f"in no segment: {reason}"
        if block.compiled or (len(right) == 1 and (wrong or whole)):
            right = [KEEP] if reason else [KEEP, RECOMPUTE]
            if reason:
                note = f"kept whole, and in no segment: {reason}"
            elif not block.compiled:
                note = f"recomputed as a whole or not at all: dropping results of calls {wrong[-1]}"
        if note:
            self.notes[block.like] = note
        return right

    def _traced(self, block: FoundBlock, runner: BlockRunner) -> Trace | str:
        """The calls of the block, or why they cannot be traced."""
        try:
            traces = []
            for _ in range(4):  # the first run is slower than any later one
                args, kwargs = runner.inputs()
                with undisturbed(nn.ModuleList(block.modules), self._step.device), self._step.autocast():
                    traces.append(trace(block, args, kwargs))
            return fastest(traces[1:])
        except Exception as error:
            return f"fails, as its calls cannot be traced ({in_words(error)})"

    def _measure_alone(self, block: FoundBlock) -> Block:
        assert block.args is not None and block.kwargs is not None
        runner = BlockRunner(self._step, block, block.args, block.kwargs)
        policies = self._policies(block, runner)
        # A first run allocates what later ones reuse, such as the gradients of parameters.
        runner.seconds(policies[:1], 0.0, least_rounds=1)
        keep, *others = runner.memory(policies)
        # Of policies with the same bytes, such as a compressed form with nothing to compress, one is measured further.
        with_bytes: dict[tuple[int, ...], Choice] = {}
        for choice in others:
            with_bytes.setdefault((choice.kept, choice.backward_peak, choice.casts), choice)
        useful = [keep, *with_bytes.values()]
        seconds = runner.seconds([choice.policy for choice in useful], self._least_seconds)
        choices = tuple(dataclasses.replace(choice, seconds=own) for choice, own in zip(useful, seconds))
        output, casts, working, forward = runner.first_pass()
        # The random state that a segment keeps is in host memory, which counts on the CPU alone.
        frame = torch.get_rng_state().nbytes if self._step.device.type == "cpu" else 0
        return Block(choices, output, forward, working, casts=casts, frame=frame)


class BlockRunner:
    """Runs one block of a step, ``function``, by itself, on copies of the inputs that the model gives it."""

    def __init__(
        self, step: Step, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._inputs = (args, kwargs)
        self._device = step.device
        self._autocast = step.autocast

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New copies of the inputs, which the block may change. As in the model, they are not leaves of the graph."""

        def fresh(tensor: Tensor) -> Tensor:
            made = tensor.detach().clone()
            # The gradient of a leaf stays in its ``grad`` after the backward
            # pass; the gradient of an activation is freed on the way.
            return made.requires_grad_().clone() if tensor.requires_grad else made

        args, kwargs = copied(self._inputs, fresh)
        return args, kwargs

    def outcome(self, policy: CheckpointPolicy, modules: Sequence[nn.Module]) -> list[int]:
        """Fingerprints of outputs, gradients and buffers of ``modules``, the block's, after one pass from the current state, which
        is restored."""
        block = nn.ModuleList(modules)
        with undisturbed(block, self._device), verifying("always"):
            args, kwargs = self.inputs()
            inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
            for tensor in inputs:
                tensor.retain_grad()
            with torch.enable_grad(), self._autocast():
                outputs = tensors_of(policy.run(self._function, args, kwargs))
            seen = fingerprints(outputs)
            ends = [tensor for tensor in outputs if tensor.requires_grad]
            if ends:
                torch.autograd.backward(ends, [_waves_like(tensor) for tensor in ends])
            return [*seen, *left_by(block, inputs)]

    def memory(self, policies: Sequence[CheckpointPolicy]) -> list[Choice]:
        """The exact bytes under each policy; seconds are 0."""
        costs = []
        with no_collection(), recording_marks(self._device) as marks:
            for policy in policies:
                args, kwargs = self.inputs()
                marks.mark("start")
                _backward(self._forward(policy, args, kwargs, marks.mark))
                marks.mark("end")
                del args, kwargs
        # Marks of one policy, and the bytes that they measure:
        #
        #     start -- forward pass -- ran -- autocast ends -- kept -- backward pass -- end
        #
        # forward_peak is the peak up to "ran", kept the bytes at "kept", casts what autocast's end frees, backward_peak the peak
        # up to "end"; all above the bytes at "start".
        for number, policy in enumerate(policies):
            start, ran, kept, end = marks.marks[4 * number : 4 * number + 4]
            costs.append(
                Choice(
                    0.0,
                    max(kept.bytes - start.bytes, 0),
                    max(ran.peak_bytes - start.bytes, 0),
                    max(end.peak_bytes - start.bytes, 0),
                    max(ran.bytes - kept.bytes, 0),
                    policy,
                )
            )
        return costs

    def first_pass(self) -> tuple[int, int, int, float]:
        """Costs of a forward pass that saves nothing: bytes of the output, bytes of casts, peak bytes, seconds."""
        seconds = []
        with recording_marks(self._device) as marks, torch.no_grad():
            for _ in range(3):
                args, kwargs = self.inputs()
                marks.mark("start")
                start = now(self._device)
                with self._autocast():
                    output = self._function(*args, **kwargs)
                    seconds.append(now(self._device) - start)
                    marks.mark("ran")
                marks.mark("output")
                del output
        # The other runs are for the time: the bytes of all are the same.
        begin, ran, end = marks.marks[:3]
        casts, peak = max(ran.bytes - end.bytes, 0), max(ran.peak_bytes - begin.bytes, 0)
        return max(end.bytes - begin.bytes, 0), casts, peak, min(seconds)

    def seconds(
        self, policies: Sequence[CheckpointPolicy], least: float, least_rounds: int = 3
    ) -> list[float]:
        """Least seconds of forward and backward pass under each policy.

        Rounds over all policies, in alternating order, take at least ``least`` seconds and ``least_rounds`` rounds. Of so few, the
        least one differs half as much from one plan to the next as the median does.
        """
        times: list[list[float]] = [[] for _ in policies]
        begin = time.perf_counter()
        rounds = 0
        while rounds < least_rounds or (rounds < 15 and time.perf_counter() - begin < least):
            # Turns around in each round, so that no policy always runs behind the same one.
            order = range(len(policies)) if rounds % 2 else range(len(policies) - 1, -1, -1)
            for index in order:
                args, kwargs = self.inputs()
                with no_collection():
                    start = now(self._device)
                    _backward(self._forward(policies[index], args, kwargs))
                    times[index].append(now(self._device) - start)
                del args, kwargs
            rounds += 1
        return [min(seconds) for seconds in times]

    def _forward(
        self,
        policy: CheckpointPolicy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mark: Callable[[str], None] = lambda name: None,
    ) -> Tensor | None:
        with torch.enable_grad(), self._autocast():
            output = policy.run(self._function, args, kwargs)
            mark("ran")
        mark("kept")
        ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        end: Tensor | None = _End.apply(*ends) if ends else None  # type: ignore[no-untyped-call]
        return end


def _waves_like(tensor: Tensor) -> Tensor:
    """A gradient with different elements for a tensor. With equal ones, the gradient of a softmax would be zero."""
    return torch.arange(tensor.numel(), device=tensor.device).cos().to(tensor.dtype).view(tensor.shape)


class _End(torch.autograd.Function):
    """End of a block in place of the rest of a model, with gradients of ones.

    Nothing else holds these gradients, so that they are freed as early as the gradient of a block's output is in a model.
    """

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        # Shapes without memory: an output that is saved here would be held up to the backward pass, where a model may free it.
        ctx.like = [(torch.empty_like(tensor, device="meta"), tensor.device) for tensor in ends]
        return ends[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones_like(shape, device=device) for shape, device in ctx.like)


def _backward(end: Tensor | None) -> None:
    if end is not None:
        # ``end`` has no elements, and so its gradient has none. _End makes the gradients of the block's outputs.
        torch.autograd.backward([end], [torch.empty_like(end)])
