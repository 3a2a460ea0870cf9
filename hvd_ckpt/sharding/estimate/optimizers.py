"""What an optimizer holds per element, and what a step of it allocates for a while: measured on small tensors.

Implementations differ: a loop over parameters needs temporaries as large as the largest of them (torch's on a CPU, which still
holds one of the parameter before), one over lists of tensors (``foreach``, the default on CUDA) as large as all of them, a fused
one none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hvd_ckpt.memory import Marks, recording_marks
from hvd_ckpt.names import unknown
from hvd_ckpt.sharding.elementwise import check_elementwise

__all__ = ["OptimizerBytes", "OptimizerFacts", "check_optimizer"]

_NUMEL = 1 << 14
_COUNTS = (1, 2, 3)  # of parameters


class OptimizerBytes(NamedTuple):
    """Bytes that an optimizer takes for parameters of one dtype.

    Attributes:
        state: per element.
        state_each: per parameter, whatever its size (step counts).
        all: temporaries of a step per element of all parameters.
        this, last: temporaries per element of the parameter being stepped, and of the one before it.
    """

    state: int
    state_each: int
    all: int
    this: int
    last: int

    def temporaries(self, numels: Sequence[int]) -> int:
        """The most bytes that a step on parameters of these sizes, in this order, allocates at a time."""
        alone = max(
            (self.this * this + self.last * last for this, last in zip(numels, (0, *numels))), default=0
        )
        return self.all * sum(numels) + alone


class OptimizerFacts:
    """An optimizer's parameter groups, and what each takes.

    Args:
        optimizer: name, class or instance, as for :func:`hvd_ckpt.estimate_memory`.
        model: whose parameters it steps.

    Attributes:
        groups: names of each group's parameters, in its order.

    Raises:
        ValueError: no such optimizer, or it has none of the model's parameters.
    """

    def __init__(self, optimizer: object, model: nn.Module) -> None:
        self._measured: dict[tuple[int, torch.dtype, torch.device], OptimizerBytes] = {}
        if isinstance(optimizer, torch.optim.Optimizer):
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            self._instance = optimizer
            self.groups = [
                [names[id(one)] for one in group["params"] if id(one) in names]
                for group in optimizer.param_groups
            ]
            if not any(self.groups):
                raise ValueError(
                    "optimizer has none of the model's parameters: pass one that was made with model.parameters() and not yet "
                    "wrapped, or a name such as 'adamw'"
                )
            return
        kind = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            raise ValueError(
                f"optimizer must be the name of a class of torch.optim, a class, or an optimizer, not {optimizer!r}"
            )
        try:
            self._instance = kind([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"optimizer {kind.__name__} cannot be made with its default options ({error}): pass an instance"
            ) from None
        self.groups = [[name for name, parameter in model.named_parameters() if parameter.requires_grad]]

    def check_elementwise(self) -> None:
        """Makes sure that its state can be split.

        Raises:
            ValueError: it cannot.
        """
        check_elementwise(self._instance)

    def bytes(self, group: int, dtype: torch.dtype, device: torch.device) -> OptimizerBytes:
        """What it takes for parameters of this dtype in this group."""
        key = (group, dtype, device)
        if key not in self._measured:
            options = dict(self._instance.param_groups[group])
            del options["params"]
            options.pop("param_names", None)
            kind = getattr(self._instance, "_wrapped_class", type(self._instance))
            self._measured[key] = _measure(kind, options, dtype, device)
        return self._measured[key]


def check_optimizer(name: str) -> None:
    """Makes sure that there is an optimizer of that name whose state can be split.

    Raises:
        ValueError: there is none.
    """
    OptimizerFacts(name, nn.Linear(1, 1)).check_elementwise()


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


def _measure(kind: Any, options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> OptimizerBytes:
    state: list[tuple[int, int]] = []
    peaks: list[int] = []
    with recording_marks(device) as marks:
        for count in _COUNTS:
            state = _stepped(kind, options, dtype, device, count, marks)
    for start, end in zip(marks.marks[::3], marks.marks[1::3]):
        peaks.append(round(max(end.peak_bytes - start.bytes, 0) / _NUMEL))
    one, two, three = peaks
    every = three - two
    return OptimizerBytes(
        state=sum(nbytes for numel, nbytes in state if numel == _NUMEL) // _NUMEL,
        state_each=sum(nbytes for numel, nbytes in state if numel != _NUMEL),
        all=every,
        this=one - every,
        last=max(two - one - every, 0),
    )


def _stepped(
    kind: Any,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    count: int,
    marks: Marks,
) -> list[tuple[int, int]]:
    """Steps twice, the second time between marks; returns numel and bytes of each state tensor of a parameter."""
    parameters = [torch.nn.Parameter(torch.zeros(_NUMEL, dtype=dtype, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        arguments = inspect.signature(kind).parameters
        own = {name: value for name, value in options.items() if name in arguments}
        optimizer = kind([{**options, "params": parameters}], **own)
        optimizer.step()
        marks.mark("start")
        optimizer.step()
        marks.mark("end")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the memory of optimizer {kind.__name__} cannot be estimated, since it does not step on a vector: "
            f"{' '.join(str(error).split())}; take one such as AdamW"
        ) from None
    found = [
        (value.numel(), value.untyped_storage().nbytes())
        for value in optimizer.state[parameters[0]].values()
        if isinstance(value, torch.Tensor)
    ]
    if any(numel not in (1, _NUMEL) for numel, _ in found):
        raise ValueError(
            f"the memory of optimizer {kind.__name__} cannot be estimated, since its state has other shapes than its parameters; "
            "take one such as AdamW"
        )
    del optimizer, parameters, parameter
    marks.mark("gone")
    return found
