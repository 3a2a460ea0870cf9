"""Measurements for a memory estimate: the activations of a step, and the bytes of an optimizer per element.

An optimizer is measured on small vectors. A loop over parameters needs temporaries for the largest of them, and a loop over lists
of tensors (``foreach``, the default on CUDA) for all of them. A fused optimizer needs none.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.planning.step import Step
from hvd_ckpt.utils.elementwise import class_of, optimizer_classes
from hvd_ckpt.utils.measure import now, undisturbed
from hvd_ckpt.utils.memory import recording_marks
from hvd_ckpt.utils.text import unknown

_NUMEL = 1 << 14


class Stretch(NamedTuple):
    """A part of the measured step, which ends where a gradient is accumulated, the loss is known or the step is over.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        activations: the most bytes of them during it.
        final: bytes of the gradients that are final at its start.
        held: bytes of activations at its start.
    """

    phase: str
    activations: int
    final: int
    held: int = 0


def measure_step(step: Step) -> list[Stretch]:
    """Runs the step twice, and records the second run."""
    accumulated: list[Tensor] = []
    with undisturbed(step.model, step.device):
        step.run()
        gc.collect()
        with step.recorded() as (run, marks), contextlib.ExitStack() as stack:

            def after_accumulation(parameter: Tensor) -> None:
                accumulated.append(parameter)
                marks.mark("gradient")

            for parameter in step.model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            run()
    last = {id(parameter): number for number, parameter in enumerate(accumulated)}
    gradients = iter(enumerate(accumulated))
    stretches: list[Stretch] = []
    final = held = 0
    for mark in marks.marks:
        stretches.append(Stretch("backward" if stretches else "forward", mark.peak_bytes, final, held))
        held = mark.bytes
        if mark.name == "gradient":
            number, owner = next(gradients)
            # A gradient is final at its last accumulation; at earlier ones more is to come.
            final += owner.nbytes * (last[id(owner)] == number)
    return stretches


class OptimizerMemory(NamedTuple):
    """Bytes that an optimizer takes for parameters of one dtype.

    Attributes:
        state: per element.
        temporaries: bytes of temporaries in a step, for each element that it updates at once.
        at_once: it steps all parameters at once (``foreach``, the default on CUDA), not one after the other.
    """

    state: float
    temporaries: float
    at_once: bool

    @classmethod
    def measure(
        cls, optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device
    ) -> OptimizerMemory:
        """Measures a step of the optimizer's class on two vectors, with the options of its first parameter group.

        Raises:
            ValueError: it does not step on a vector, or its state has other shapes than its parameters.
        """
        parameters = [nn.Parameter(torch.zeros(_NUMEL, dtype=dtype, device=device)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        reason = None
        try:
            made = _like(optimizer, parameters)
            # The first step makes the state, and is not measured.
            made.step()
            with recording_marks(device) as marks:
                marks.mark("start")
                made.step()
                marks.mark("end")
            state = [value for value in made.state[parameters[0]].values() if isinstance(value, Tensor)]
            if any(value.numel() not in (1, _NUMEL) for value in state):
                reason = "its state has other shapes than its parameters"
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"it does not step on a vector ({' '.join(str(error).split())})"
        if reason:
            raise ValueError(
                f"the memory of optimizer {class_of(optimizer).__name__} cannot be estimated, since {reason}; take one "
                "such as AdamW"
            )
        start, end = marks.marks
        kept = sum(value.untyped_storage().nbytes() for value in state if value.numel() == _NUMEL)
        foreach = optimizer.param_groups[0].get("foreach")
        at_once = device.type == "cuda" if foreach is None else bool(foreach)
        stepped = len(parameters) * _NUMEL if at_once else _NUMEL
        return cls(kept / _NUMEL, max(end.peak_bytes - start.bytes, 0) / stepped, at_once)


def _like(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One of the same class for other parameters, with the options of its first group."""
    kind: Any = class_of(optimizer)
    options = {
        name: value
        for name, value in optimizer.param_groups[0].items()
        if name not in ("params", "param_names")
    }
    arguments = inspect.signature(kind).parameters
    own = {name: value for name, value in options.items() if name in arguments}
    made: torch.optim.Optimizer = kind([{**options, "params": parameters}], **own)
    return made


def make_optimizer(optimizer: object, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the kind that is meant.

    Args:
        optimizer: name of a class of ``torch.optim`` in lower case, a class, or an optimizer of the model's parameters.

    Raises:
        ValueError: there is no such optimizer, or it has none of the model's parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                "optimizer has none of the model's parameters: pass one that was made with model.parameters() and not yet "
                "wrapped, or a name such as 'adamw'"
            )
        return optimizer
    kind: Any = optimizer
    if isinstance(optimizer, str):
        known = optimizer_classes()
        kind = known.get(optimizer.strip().lower())
        if kind is None:
            raise ValueError(unknown("optimizer", optimizer, sorted(known)))
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer must be the name of a class of torch.optim, a class, or an optimizer, not {optimizer!r}"
        )
    try:
        return kind([nn.Parameter(torch.zeros(1, dtype=torch.float32))])  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer {kind.__name__} cannot be made with its default options ({error}): pass an instance"
        ) from None


class Update(NamedTuple):
    """Seconds of an optimizer's step, for each parameter and for each of its elements."""

    parameter: float
    element: float

    @classmethod
    def measure(cls, optimizer: object, model: nn.Module) -> Update:
        """Measures steps of an optimizer as of :func:`make_optimizer`, on a large parameter and on many small ones of float32."""
        own, device = make_optimizer(optimizer, model), next(model.parameters()).device

        def seconds(count: int, numel: int) -> float:
            parameters = [nn.Parameter(torch.zeros(numel, device=device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            made, times = _like(own, parameters), []
            for _ in range(5):
                start = now(device)
                made.step()
                times.append(now(device) - start)
            return statistics.median(times[1:])

        return cls(seconds(128, 64) / 128, seconds(1, 1 << 22) / (1 << 22))
