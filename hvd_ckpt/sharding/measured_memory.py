"""Measurements behind a memory estimate: the activations of a step, and what an optimizer takes per element.

An optimizer is measured on small vectors, since implementations differ: a loop over parameters needs temporaries as large as the
largest of them, one over lists of tensors (``foreach``, the default on CUDA) as large as all of them, a fused one none.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvd_ckpt.measure import undisturbed
from hvd_ckpt.memory import recording_marks
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.sharding.elementwise import check_elementwise
from hvd_ckpt.text import unknown

_NUMEL = 1 << 14


class Stretch(NamedTuple):
    """A part of the measured step, which ends where a gradient is accumulated, the loss is known or the step is over.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        start, peak: bytes of activations at its start, and the most during it.
        final: number of parameters whose gradients are final at its start.
    """

    phase: str
    start: int
    peak: int
    final: int


def measure_step(step: Step) -> tuple[list[Stretch], list[str]]:
    """Runs the step twice and records the second run; also names parameters in the order in which gradients become final."""
    accumulations: list[str] = []
    with undisturbed(step.model, step.device):
        step.run()
        gc.collect()
        with contextlib.ExitStack() as stack:
            marks = stack.enter_context(recording_marks(step.device))

            def watch(name: str, parameter: Tensor) -> None:
                def accumulated(_: Tensor) -> None:
                    accumulations.append(name)
                    marks.mark("gradient")

                handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)

            for name, parameter in step.model.named_parameters():
                if parameter.requires_grad:
                    watch(name, parameter)
            step.run(marks)
            marks.mark("end")
    last = {name: number for number, name in enumerate(accumulations)}
    found, start, seen, final, phase = [], 0, 0, 0, "forward"
    for mark in marks.marks:
        found.append(Stretch(phase, start, mark.peak_bytes, final))
        start = mark.bytes
        if mark.name == "gradient":
            final += last[accumulations[seen]] == seen
            seen += 1
        phase = "backward"
    return found, sorted(last, key=lambda name: last[name])


class OptimizerMemory(NamedTuple):
    """Bytes that an optimizer takes for parameters of one dtype.

    Attributes:
        state: per element.
        all: temporaries of a step per element of all parameters.
        largest: temporaries per element of the largest parameter.
    """

    state: float
    all: float
    largest: float

    def temporaries(self, numel: int, largest: int) -> int:
        """Bytes that a step on ``numel`` elements in all allocates, of which the largest parameter has ``largest``."""
        return round(self.all * numel + self.largest * largest)

    @classmethod
    def measure(
        cls, optimizer: torch.optim.Optimizer, dtype: torch.dtype, device: torch.device
    ) -> OptimizerMemory:
        """Measures the optimizer's class with its options; where groups have different options, those of each count by its
        number of elements.

        Raises:
            ValueError: it does not step on a vector, or its state has other shapes than its parameters.
        """
        kind: Any = getattr(optimizer, "_wrapped_class", type(optimizer))
        found, sizes = [], []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            sizes.append(sum(parameter.numel() for parameter in group["params"]) or 1)
            (_, two), (state, three) = (_step(kind, options, dtype, device, count) for count in (2, 3))
            each = (three - two) / _NUMEL
            found.append(cls(state / _NUMEL, each, max(two / _NUMEL - 2 * each, 0)))
        mean = (
            sum(values) / sum(sizes)
            for values in zip(*([size * one for one in memory] for size, memory in zip(sizes, found)))
        )
        return cls(*mean)


def make_optimizer(optimizer: object, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the kind that is meant.

    Args:
        optimizer: name of a class of ``torch.optim`` in lower case, a class, or an optimizer of the model's parameters.

    Raises:
        ValueError: there is no such optimizer, or it has none of the model's parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            raise ValueError(
                "optimizer has none of the model's parameters: pass one that was made with model.parameters() and not yet "
                "wrapped, or a name such as 'adamw'"
            )
        return optimizer
    kind: Any = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer must be the name of a class of torch.optim, a class, or an optimizer, not {optimizer!r}"
        )
    try:
        return kind([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer {kind.__name__} cannot be made with its default options ({error}): pass an instance"
        ) from None


def check_optimizer(name: str) -> None:
    """Checks that there is an optimizer of that name, and that its state can be split.

    Raises:
        ValueError: it does not exist or cannot be split.
    """
    check_elementwise(make_optimizer(name, nn.Linear(1, 1)))


def _class_named(name: str) -> Any:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name.strip().lower() not in classes:
        raise ValueError(unknown("optimizer", name, sorted(classes)))
    return classes[name.strip().lower()]


def _step(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, device: torch.device, count: int
) -> tuple[int, int]:
    """Steps twice on so many vectors: bytes of state of the first one, and the peak of the second step."""
    parameters = [nn.Parameter(torch.zeros(_NUMEL, dtype=dtype, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    arguments = inspect.signature(kind).parameters
    try:
        own = {name: value for name, value in options.items() if name in arguments}
        optimizer = kind([{**options, "params": parameters}], **own)
        optimizer.step()
        with recording_marks(device) as marks:
            marks.mark("start")
            optimizer.step()
            marks.mark("end")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the memory of optimizer {kind.__name__} cannot be estimated, since it does not step on a vector: "
            f"{' '.join(str(error).split())}; take one such as AdamW"
        ) from None
    state = [value for value in optimizer.state[parameters[0]].values() if isinstance(value, torch.Tensor)]
    if any(value.numel() not in (1, _NUMEL) for value in state):
        raise ValueError(
            f"the memory of optimizer {kind.__name__} cannot be estimated, since its state has other shapes than its parameters; "
            "take one such as AdamW"
        )
    start, end = marks.marks
    kept = sum(value.untyped_storage().nbytes() for value in state if value.numel() == _NUMEL)
    return kept, max(end.peak_bytes - start.bytes, 0)
