"""When units are gathered and freed: around forward, and from the gradient of the output to that of the input.

    forward pass     before the first module of a unit: gather it, begin to gather the next one
                     after the last: free it
    backward pass    a hook on its outputs' gradients: gather it, begin to gather the next one
                     recomputation, gradients: find it there
                     an identity on its inputs, whose backward pass comes after all of the unit's: free it

The hook on the outputs runs before anything that is behind them, a recomputation included, so one gather serves both. A region
that is recomputed reentrantly has no graph to hook; there it is the recomputation that finds the unit free and gathers it.
What nothing frees (no input requires a gradient) goes at the end of the outermost backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvd_ckpt.frames import is_recomputing
from hvd_ckpt.sharding.module_hooks import Visit, enter, is_entrance, leave, tensors_left_in, tensors_within
from hvd_ckpt.sharding.unshard import Orders, Pass, UnitParameters
from hvd_ckpt.torch_private import (
    DisableTorchFunction,
    current_graph_task_id,
    disable_current_modes,
    execution_engine,
    pytree,
)

__all__ = ["GatherStats", "Passes", "ShardedUnit"]


@dataclass
class GatherStats:
    """Gathers since the start, by unit.

    Attributes:
        forward, backward: those in forward and in backward passes.
        early: those of them that were begun while another unit was at work.
    """

    forward: list[int]
    backward: list[int]
    early: list[int]


@dataclass(eq=False)
class ShardedUnit:
    """A unit at run time.

    Attributes:
        number: its place among the units; the last one is that of the model itself.
        modules: how many run, one after the other.
        parameters: of the unit.
        running: how many calls of its modules have begun and not ended.
        visit: in which its modules run now.
        returning: visits whose backward pass has begun and not ended.
        lasting: its memory is needed beyond its backward pass (that pass is differentiated itself).
    """

    number: int
    modules: int
    parameters: UnitParameters
    running: int = 0
    visit: Visit | None = None
    returning: set[Visit] = field(default_factory=set)
    lasting: bool = False


class Passes:
    """The forward and backward passes of a model whose parameters are split.

    Args:
        units: in the model's order, that of the model last, each with the number of its modules.

    Attributes:
        held: nothing is freed while it is not 0.
    """

    def __init__(self, units: Sequence[tuple[UnitParameters, int]]) -> None:
        self.units = [
            ShardedUnit(number, modules, parameters) for number, (parameters, modules) in enumerate(units)
        ]
        self.root = self.units[-1]
        self.stats = GatherStats(*([0] * len(units) for _ in range(3)))
        self.held = 0
        self._orders = Orders()
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        missed = weakref.WeakMethod(self._missed)
        for unit in self.units:
            unit.parameters.when_missed(functools.partial(_tell, missed, unit.number))

    @property
    def busy(self) -> bool:
        """A forward or backward pass is running."""
        return any(unit.running for unit in self.units) or _in_backward()

    def begin(self, unit: ShardedUnit, number: int, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A module of the unit, by its number there, is about to run; returns what it is given instead."""
        unit.running += 1
        with _quietly():
            if _in_backward():
                self._turn_back()
            elif self._backward is not None:  # that pass has failed
                self.reset()
                unit.running += 1
            if unit is self.root and number == 0 and self._forward is None and not _in_backward():
                self._forward = Pass("training" if torch.is_grad_enabled() else "evaluation")
            self._need(unit)
        if unit is self.root or (unit.visit is not None and number in unit.visit.left):
            return None
        unit.visit = Visit(unit.number, unit.modules)
        return enter(unit.visit, self.returned, args, kwargs) if torch.is_grad_enabled() else None

    def end(self, unit: ShardedUnit, number: int, module: nn.Module, output: Any) -> Any:
        """The module has run, or failed, and then has no output; returns its output."""
        unit.running = max(unit.running - 1, 0)
        visit = unit.visit
        if visit is not None:
            leave(visit)
            if number in visit.left:
                visit.left.remove(number)
            if not visit.left:
                unit.visit = None
        awaited = False
        if unit is not self.root or not unit.running:
            awaited = self._watch(unit, visit, module, output)
            output = _apart(unit.parameters, output)
        if not _in_backward():
            with _quietly():
                if unit is self.root:
                    self._end_of_root(number, awaited)
                elif unit.visit is None and not awaited:
                    self._free(unit)
        return output

    def reset(self) -> None:
        """No forward and no backward pass is running now, whatever became of the last ones: all memory is given back."""
        self._forward = self._backward = None
        for unit in self.units:
            unit.running = 0
            unit.visit = None
            unit.returning.clear()
            unit.lasting = False
            self._free(unit)
            if unit.parameters.coming and not self.held:
                unit.parameters.free()

    def hold(self) -> None:
        """Makes all units whole, exactly, until :meth:`let_go`.

        Raises:
            RuntimeError: a backward pass is running.
        """
        if self.busy:
            raise RuntimeError(
                "optimizer.gathered_parameters() does not work inside a forward or backward pass"
            )
        if not self.held:
            self.reset()
            with _quietly():
                for unit in self.units:
                    unit.parameters.launch(exactly=True)
                for unit in self.units:
                    unit.parameters.wait()
        self.held += 1

    def let_go(self) -> None:
        """Keeps what was written to the whole parameters, and frees them.

        Raises:
            RuntimeError: a parameter has got another dtype, device or shape.
        """
        self.held -= 1
        if self.held:
            return
        try:
            with _quietly():
                for unit in self.units:
                    unit.parameters.keep_own()
        finally:
            self.reset()

    def _end_of_root(self, number: int, awaited: bool) -> None:
        """The model has run, or a module of it that has parameters of the last unit."""
        if number == 0 and not self.root.running:
            if self._forward is not None:
                self._orders.end(self._forward)
            self._forward = None
            for unit in self.units[:-1]:  # whose last module did not run
                if not unit.running and unit.visit is not None:
                    unit.visit = None
                    self._free(unit)
        if not awaited:
            self._free(self.root)

    def _watch(self, unit: ShardedUnit, visit: Visit | None, module: nn.Module, output: Any) -> bool:
        """Gathers the unit when a gradient comes back to what its module has returned, or left in an attribute.

        Returns:
            Whether it is better not to free the unit now: that of the model, which the backward pass needs first; and where the
            output hides its tensors.
        """
        if not torch.is_grad_enabled():
            return False
        with DisableTorchFunction():
            found = list(tensors_within(output))
            watched = [
                tensor
                for tensor in (*found, *tensors_left_in(module, unit))
                if tensor.requires_grad and not is_entrance(tensor)
            ]
            for tensor in watched:
                tensor.register_hook(lambda gradient: self._return(unit, visit))  # type: ignore[no-untyped-call]
        if not found and output is not None:
            return True
        return unit is self.root and bool(watched)

    def _return(self, unit: ShardedUnit, visit: Visit | None) -> None:
        """A gradient has come back to an output of the unit."""
        differentiated = torch.is_grad_enabled()
        with _quietly():
            self._turn_back()
            if visit is not None:
                unit.returning.add(visit)
            if differentiated and self._backward is not None:
                self._backward.differentiated = True
            self._need(unit)

    def returned(self, visit: Visit) -> None:
        """The backward pass of this visit is over."""
        unit = self.units[visit.unit]
        unit.returning.discard(visit)
        with _quietly():
            self._free(unit)

    def _missed(self, number: int) -> None:
        """A recomputation of operations apart from their modules reads parameters of the unit."""
        with _quietly():
            self._turn_back()
            self._need(self.units[number])

    def _turn_back(self) -> None:
        """A backward pass is running; its end will be heard of."""
        if self._backward is None and current_graph_task_id() != -1:
            self._backward = Pass("backward")
            execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        finished, self._backward = self._backward, None
        if finished is None:
            return
        self._orders.end(finished)
        with _quietly():
            for unit in self.units:
                unit.returning.clear()
                if not unit.running:
                    unit.visit = None
                unit.lasting = finished.differentiated and unit.parameters.whole
                self._free(unit)

    def _need(self, unit: ShardedUnit) -> None:
        """Makes the unit whole, and begins with the next one."""
        parameters = unit.parameters
        if parameters.whole:
            return
        back = _in_backward()
        (self.stats.backward if back else self.stats.forward)[unit.number] += 1
        if parameters.coming:
            self.stats.early[unit.number] += 1
        else:
            parameters.launch()
        current = self._backward if back else self._forward
        following = None if current is None else self._orders.next(current, unit.number)
        if following is not None and self.units[following].parameters.free_now:
            self.units[following].parameters.launch()
        try:
            parameters.wait()
        except RuntimeError:  # the model was converted, say: it is what it was before from here on
            for other in self.units:
                if not other.parameters.whole:
                    other.parameters.restore()
            raise

    def _free(self, unit: ShardedUnit) -> None:
        """Frees the unit unless somebody needs it."""
        if self.held or unit.running or unit.returning or unit.lasting or not unit.parameters.whole:
            return
        if self._backward is not None and self._backward.differentiated:
            return
        unit.parameters.free()


def _tell(missed: Callable[[], Callable[[int], None] | None], number: int) -> None:
    tell = missed()
    if tell is not None:
        tell(number)


def _in_backward() -> bool:
    return current_graph_task_id() != -1 or is_recomputing()


def _apart(parameters: UnitParameters, output: Any) -> Any:
    """The output, with copies of those tensors that lie in the memory of the unit."""
    with DisableTorchFunction():
        if not any(parameters.holds(tensor) for tensor in tensors_within(output)):
            return output
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if parameters.holds(tensor) else tensor, output
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Context for work that is not the model's: hooks and modes that watch the model do not see it, and it has no gradient."""
    with DisableTorchFunction(), disable_current_modes(), torch.no_grad():
        yield
