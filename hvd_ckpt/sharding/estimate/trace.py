"""One forward and backward pass of a model in one process, cut where a sharded one takes or gives back memory.

Between two cuts a sharded step holds what this one holds, plus or minus something that does not change there: so the peak of each
stretch is all that has to be known to find the peak of a step on any number of ranks.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hvd_ckpt.measure import undisturbed
from hvd_ckpt.memory import Marks, recording_marks
from hvd_ckpt.planning.profile import Step
from hvd_ckpt.recompute.calls import tensors_in
from hvd_ckpt.torch_private import current_graph_task_id

__all__ = ["Event", "Stretch", "bare_trace", "completions", "fires", "trace_step"]


class Event(NamedTuple):
    """What ends a stretch.

    Attributes:
        kind: ``gradient`` (of a parameter has been accumulated); ``forward``, ``kept``, ``backward`` (a unit of modules begins its
            forward pass, ends it, begins its backward pass, recomputation included); ``loss``; ``end``.
        number: of the parameter or unit.
    """

    kind: str
    number: int = 0


class Stretch(NamedTuple):
    """The memory between two events.

    Attributes:
        peak: the most bytes above the start of the step, gradients counted.
        end: bytes at its end.
        event: what ends it.
    """

    peak: int
    end: int
    event: Event


def trace_step(step: Step, units: Sequence[Sequence[str]] = ()) -> list[Stretch]:
    """Runs the step twice and records the second run. Gradients are None at its start; the model is left as it was.

    Args:
        units: names of modules whose parameters are gathered together, as in ``model.named_modules()``.
    """
    events: list[Event] = []
    with undisturbed(step.model, step.device):
        parameters = list(step.model.parameters())
        _clear(parameters)
        step.run()
        _clear(parameters)
        gc.collect()
        with recording_marks(step.device) as marks, _recorded(step.model, units, marks, events):
            step.run(_Loss(marks, events))
            _mark(marks, events, Event("end"))
    return [Stretch(mark.peak_bytes, mark.bytes, event) for mark, event in zip(marks.marks, events)]


def bare_trace(parameters: Sequence[Tensor], units: Sequence[Sequence[int]] = ()) -> list[Stretch]:
    """A step without activations: the gradient of each parameter comes once, last ones first.

    Args:
        units: numbers of the parameters that are gathered together.
    """
    numbers = range(len(units))
    events = [Event(kind, number) for number in numbers for kind in ("forward", "kept")]
    events.append(Event("loss"))
    placed = [index for unit in units for index in unit]
    for number in reversed(numbers):
        events.append(Event("backward", number))
        events.extend(Event("gradient", index) for index in reversed(units[number]))
    events.extend(
        Event("gradient", index) for index in reversed(range(len(parameters))) if index not in placed
    )
    trace, held = [], 0
    for event in events:
        if event.kind == "gradient":
            if not parameters[event.number].requires_grad:
                continue
            held += parameters[event.number].nbytes
        trace.append(Stretch(held, held, event))
    return [*trace, Stretch(held, held, Event("end"))]


def fires(trace: Sequence[Stretch]) -> list[int]:
    """The parameters whose gradients are accumulated, each as often as that happens."""
    return [stretch.event.number for stretch in trace if stretch.event.kind == "gradient"]


def completions(trace: Sequence[Stretch]) -> list[int]:
    """The parameters that get a gradient, in the order in which it is final."""
    return list(dict.fromkeys(reversed(fires(trace))))[::-1]


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _mark(marks: Marks, events: list[Event], event: Event) -> None:
    events.append(event)
    marks.mark(event.kind)


class _Loss(Marks):
    """Where the step says that its forward pass is over."""

    def __init__(self, marks: Marks, events: list[Event]) -> None:
        self._to = (marks, events)

    def mark(self, name: str) -> None:
        _mark(*self._to, Event(name))


@contextlib.contextmanager
def _recorded(
    model: nn.Module, units: Sequence[Sequence[str]], marks: Marks, events: list[Event]
) -> Iterator[None]:
    def say(kind: str, number: int) -> Callable[..., None]:
        return lambda *_: _mark(marks, events, Event(kind, number))

    handles: list[Any] = []
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            say_it = say("gradient", number)
            handles.append(parameter.register_post_accumulate_grad_hook(say_it))  # type: ignore[no-untyped-call]
    for number, names in enumerate(units):
        modules = [model.get_submodule(name) for name in names]
        for module in modules:
            unit = _Unit(say("forward", number), say("kept", number), say("backward", number))
            handles.append(module.register_forward_pre_hook(unit.before))
            handles.append(module.register_forward_hook(unit.after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Unit:
    """Hooks of one module: its first call is the forward pass, a later one recomputes."""

    def __init__(
        self, forward: Callable[..., None], kept: Callable[..., None], backward: Callable[..., None]
    ) -> None:
        self._forward, self._kept, self._backward = forward, kept, backward
        self._calls = 0

    def before(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        (self._forward if current_graph_task_id() < 0 else self._backward)()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if current_graph_task_id() >= 0:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._arrived)  # type: ignore[no-untyped-call]
                break
        self._kept()

    def _arrived(self, gradient: Tensor) -> None:
        self._backward()
