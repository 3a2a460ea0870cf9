"""Runner of one block of a model by itself, to measure its bytes and seconds under each checkpoint policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.chain import Choice
from hvd_ckpt.planning.inputs import copied, fingerprints, left_by, tensors_of
from hvd_ckpt.planning.policy import CheckpointPolicy
from hvd_ckpt.planning.step import Step
from hvd_ckpt.recompute.verify import verifying
from hvd_ckpt.utils.measure import no_collection, now, undisturbed
from hvd_ckpt.utils.memory import recording_marks


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
