"""Schedule of unsharding and resharding: around the forward pass, and from the gradient of the output to that of the input.

    forward pass     pre-forward of a unit's first module: unshard it, begin with the next one
                     post-forward of its last module: reshard it
    backward pass    pre-backward, a hook on its outputs' gradients: unshard it, begin with the next one
                     recomputation, gradients: find it there
                     post-backward, an identity on its inputs, whose backward pass comes after all of the unit's: reshard it

The hook on the outputs runs before anything that is behind them, a recomputation included, so one gather serves both. The output
may be unused, so the same hook is on whatever else leaves the unit, and on the outputs of all modules that have parameters of it.
A region that is recomputed reentrantly has no graph to hook; there the recomputation finds the unit sharded and gathers it. If no
input requires a gradient, the unit is resharded at the end of the outermost backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hvd_ckpt.sharding.module_hooks import (
    UnitCall,
    adopt_changes,
    apart,
    is_input,
    register_post_backward,
    tensors_left_in,
    tensors_within,
)
from hvd_ckpt.sharding.unshard import ShardedUnit
from hvd_ckpt.utils.frames import aside, is_recomputing
from hvd_ckpt.utils.torch_private import (
    DisableTorchFunction,
    current_graph_task_id,
    execution_engine,
    sequence_number,
)


@dataclass
class Pass:
    """One forward or backward pass.

    Attributes:
        kind: passes of one kind that begin with the same unit are assumed to be equal.
        taken: the units gathered so far.
        learned: those of the last pass like it, while this one is like it.
        differentiated: it is a backward pass that makes a graph of its own (``create_graph=True``).
    """

    kind: str
    taken: list[int] = field(default_factory=list)
    learned: list[int] | None = None
    differentiated: bool = False


# One training step of units A and B, and the root R with what they share, with ``unshard`` as + and ``reshard`` as -:
#
#   forward    +R  +A (B begins)  A runs  -A   +B  B runs  -B    R stays whole: the backward pass needs it first
#   backward       +B (A begins)  B's gradients  -B   +A  A's gradients  -A   -R at the end
#
# + comes from a pre-forward hook, or from a hook on an output's gradient; - from a post-forward hook, or from the node that
# ``register_post_backward`` puts before a unit's inputs. "Begins" is the all-gather of the unit that came next in the last
# pass. A recomputed unit runs its modules inside the backward pass: its hooks find it whole, and free nothing.


class Passes:
    """The forward and backward passes of a model whose parameters are split.

    Args:
        units: in the model's order, that of the model last.

    Attributes:
        summoned: nothing is freed while it is not 0.
    """

    def __init__(self, units: Sequence[ShardedUnit]) -> None:
        self.units, self.root = units, units[-1]
        self.summoned = 0
        self._learned: dict[tuple[str, int], list[int]] = {}  # by kind and first unit, those of the last pass
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        # Weakly: absent_storages, which holds these callbacks, belongs to the process and must not keep a model alive.
        missed = weakref.WeakMethod(self._missed)
        for number, unit in enumerate(self.units):
            unit.on_missing(functools.partial(_tell, missed, number))

    @property
    def busy(self) -> bool:
        """A forward or backward pass is running."""
        return any(unit.begun for unit in self.units) or _in_backward()

    def pre_forward(
        self, unit: ShardedUnit, number: int, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """A module of the unit, by its number there, is about to run; returns what it is given instead."""
        with aside():
            in_backward = _in_backward()
            if not in_backward and self._backward is not None:  # that pass has failed
                self.reshard()
            unit.begun.append(sequence_number())
            # Within a backward pass this call is a recomputation. That pass may begin here, where no gradient has come back to
            # an output of a unit yet.
            if in_backward:
                self._begin_backward()
            # Number 0 is the model itself. The further modules of the root own some of its parameters, and may be run alone.
            if unit is self.root and number == 0 and self._forward is None and not _in_backward():
                self._forward = Pass("training" if torch.is_grad_enabled() else "evaluation")
            self._unshard(unit)
        # The root has no call of its own: it stays whole until the pass is over. A later module of a call that is under way is
        # not the beginning of another one.
        if unit is self.root or (unit.call is not None and number in unit.call.left):
            return None
        unit.call = UnitCall(unit.modules)
        if not torch.is_grad_enabled():
            return None
        return register_post_backward(unit.call, functools.partial(self.post_backward, unit), args, kwargs)

    def post_forward(
        self, unit: ShardedUnit, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """The module has run, or failed, and then has no output; returns its output."""
        since = unit.begun.pop() if unit.begun else sequence_number()  # reshard() may have forgotten it
        call = unit.call
        if call is not None:
            adopt_changes(call)
            if number in call.left:
                call.left.remove(number)
            if not call.left:
                unit.call = None
        awaited = False
        if unit is not self.root or not unit.begun:
            awaited = self._watch(unit, call, output, tensors_left_in(module, (args, kwargs), since))
            output = apart(output, unit.holds)
        with aside():
            if not _in_backward():
                if unit is self.root:
                    self._end_of_root(number, awaited)
                elif unit.call is None and not awaited:
                    self._reshard(unit)
        return output

    def reshard(self) -> None:
        """No forward and no backward pass is running now, whatever became of the last ones: all memory is given back."""
        self._forward = self._backward = None
        for unit in self.units:
            unit.begun.clear()
            unit.call = None
            unit.in_backward.clear()
            unit.lasting = unit.awaited = False
            self._reshard(unit)
            if unit.unsharding and not self.summoned:
                unit.reshard()

    def summon(self) -> None:
        """Makes all units whole, exactly, until :meth:`release`.

        Raises:
            RuntimeError: a backward pass is running.
        """
        if self.busy:
            raise RuntimeError(
                "optimizer.gathered_parameters() does not work inside a forward or backward pass"
            )
        if not self.summoned:
            self.reshard()
            self._gather_exactly()
        self.summoned += 1

    def _gather_exactly(self) -> None:
        """Gathers what the shards hold into all units; writes to it are found."""
        with aside():
            # All are on their way before the first is waited for.
            for unit in self.units:
                unit.unshard(exactly=True)
            for unit in self.units:
                unit.wait_for_unshard()
                unit.watch_values()

    def release(self) -> None:
        """Keeps what was written to the whole parameters, and frees them.

        Raises:
            RuntimeError: a parameter has another dtype, device or shape.
        """
        self.summoned -= 1
        if self.summoned:
            return
        try:
            self._write_back()
        finally:
            self.reshard()

    def keep_written(self) -> None:
        """Within :meth:`summon`, keeps what was written so far."""
        if self.summoned:
            self.reshard()
            self._write_back()

    def _write_back(self) -> None:
        with aside():
            for unit in self.units:
                unit.write_back()

    def summon_again(self) -> None:
        """Shards have changed: within :meth:`summon`, the whole parameters follow. Collective there."""
        if self.summoned:
            with aside():
                for unit in self.units:
                    unit.reshard()
            self._gather_exactly()

    @contextlib.contextmanager
    def collected(self, here: bool) -> Iterator[list[torch.Tensor]]:
        """A context in which parameters are whole and exact, to be read, where ``here`` says so. Collective.

        Units are gathered one after the other, so a rank that reads none holds one unit at a time.

        Returns:
            Copies on the CPU that the parameters are meanwhile; none inside of :meth:`summon`.

        Raises:
            RuntimeError: a forward or backward pass is running.
        """
        if self.busy:
            raise RuntimeError("full_model_state_dict() does not work inside a forward or backward pass")
        if self.summoned:
            yield []
            return
        self.reshard()
        copies: list[list[torch.Tensor]] = []
        with contextlib.ExitStack() as stack:
            with aside():
                for unit in self.units:
                    unit.unshard(exactly=True)
                    unit.wait_for_unshard()
                    copies.append(unit.copied() if here else [])
                    unit.reshard()
            for unit, values in zip(self.units, copies):
                stack.enter_context(unit.lent(values))
            # Where this rank reads: hooks let a state_dict() through, and nothing is freed under it.
            self.summoned += here
            try:
                yield [value for values in copies for value in values]
            finally:
                self.summoned -= here

    def _end_of_root(self, number: int, awaited: bool) -> None:
        """The model has run, or a module of it that has parameters of the last unit."""
        if number == 0 and not self.root.begun:
            if self._forward is not None:
                self._learn(self._forward)
            self._forward = None
            for unit in self.units[:-1]:  # whose last module did not run
                if not unit.begun and unit.call is not None:
                    unit.call = None
                    self._reshard(unit)
        # A module that is run alone, in the first pass of a region that is recomputed reentrantly, frees nothing that a module
        # before it has left whole. So the number of gathers does not depend on how many of them a rank runs.
        self.root.awaited = awaited or (self.root.awaited and number != 0)
        if not self.root.awaited:
            self._reshard(self.root)

    def _watch(
        self, unit: ShardedUnit, call: UnitCall | None, output: Any, left: Iterable[torch.Tensor]
    ) -> bool:
        """Gathers the unit when a gradient comes back to what its module has returned, or ``left`` elsewhere.

        Returns:
            Whether it is better not to free the unit now: that of the model, which the backward pass needs first; and where the
            output hides its tensors.
        """
        if not torch.is_grad_enabled():
            return False
        with DisableTorchFunction():
            returned = list(tensors_within(output))
            found = {id(tensor): tensor for tensor in (*returned, *left)}
            watched = [tensor for tensor in found.values() if tensor.requires_grad and not is_input(tensor)]
            self._hook(unit, call, watched)
        if not returned and output is not None:
            return True
        return unit is self.root and bool(watched)

    def post_layer(self, unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> None:
        """A module inside the unit that has parameters of it has run.

        The unit's output may be unused while something inside it is used, which a hook or a cache has handed on.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with DisableTorchFunction():
                made = [tensor for tensor in tensors_within(output) if tensor.grad_fn is not None]
                self._hook(unit, unit.call, (tensor for tensor in made if not is_input(tensor)))

    def _hook(self, unit: ShardedUnit, call: UnitCall | None, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.register_hook(lambda gradient: self._pre_backward(unit, call))  # type: ignore[no-untyped-call]

    def _pre_backward(self, unit: ShardedUnit, call: UnitCall | None) -> None:
        """A gradient has come back to an output of the unit, or of a module inside it."""
        # Read before aside() turns gradients off: in a backward pass they are on with create_graph=True only.
        differentiated = torch.is_grad_enabled()
        if (
            not differentiated
            and unit.whole
            and self._backward is not None
            and (call is None or call in unit.in_backward)
        ):
            return
        with aside():
            self._begin_backward()
            if call is not None:
                unit.in_backward.add(call)
            if differentiated and self._backward is not None:
                self._backward.differentiated = True
            self._unshard(unit)

    def post_backward(self, unit: ShardedUnit, call: UnitCall) -> None:
        """The backward pass of this call of the unit is over."""
        unit.in_backward.discard(call)
        with aside():
            self._reshard(unit)

    def _missed(self, number: int) -> None:
        """A recomputation of operations apart from their modules reads parameters of the unit."""
        with aside():
            self._begin_backward()
            self._unshard(self.units[number])

    def _begin_backward(self) -> None:
        """A backward pass is running; its end will be heard of."""
        if self._backward is None and current_graph_task_id() != -1:
            self._backward = Pass("backward")
            execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        finished, self._backward = self._backward, None
        if finished is None:
            return
        # A pass that has failed does not come here, and teaches no order: reshard() drops it.
        self._learn(finished)
        with aside():
            # A unit whose inputs need no gradient has no node before them, so nothing has freed it: it is freed here.
            for unit in self.units:
                unit.in_backward.clear()
                unit.awaited = False
                if not unit.begun:
                    unit.call = None
                unit.lasting = finished.differentiated and unit.whole
                self._reshard(unit)

    def _unshard(self, unit: ShardedUnit) -> None:
        """Makes the unit whole, and begins with the next one."""
        if unit.whole:
            return
        if not unit.unsharding:
            unit.unshard()
        current = self._backward if _in_backward() else self._forward
        following = [] if current is None else self._following(current, self.units.index(unit))
        # One unit ahead travels beside the computation of this one. Two would hold the memory of three; of the second only
        # offloaded shards are read.
        for ahead, number in enumerate(following):
            later = self.units[number]
            if later.sharded:
                later.prefetch() if ahead else later.unshard()
        try:
            unit.wait_for_unshard()
        except RuntimeError:  # the model was converted, say: it is what it was before from here on
            for other in self.units:
                if not other.whole:
                    other.make_absent()
            raise

    def _following(self, current: Pass, unit: int) -> list[int]:
        """Notes that a unit is gathered now; returns the two that came next in the last pass, or none where this is another pass.

        All ranks do the same work, so all learn the same order and begin early with the same unit.
        """
        if not current.taken:
            current.learned = self._learned.get((current.kind, unit))
        position = len(current.taken)
        current.taken.append(unit)
        learned = current.learned
        if learned is None or position >= len(learned) or learned[position] != unit:
            # From here on this pass is another one than the last: nothing more is begun early, and its own order is learned.
            current.learned = None
            return []
        return learned[position + 1 : position + 3]

    def _learn(self, finished: Pass) -> None:
        if finished.taken:
            self._learned[finished.kind, finished.taken[0]] = finished.taken

    def _reshard(self, unit: ShardedUnit) -> None:
        """Frees the unit unless somebody needs it."""
        if self.summoned or unit.begun or unit.in_backward or unit.lasting or not unit.whole:
            return
        # A pass with create_graph=True is differentiated itself: its graph refers to the whole parameters.
        if self._backward is not None and self._backward.differentiated:
            return
        unit.reshard()
        torch.clear_autocast_cache()  # which keeps a copy of each whole parameter until autocast ends


def _tell(missed: Callable[[], Callable[[int], None] | None], number: int) -> None:
    tell = missed()
    if tell is not None:
        tell(number)


def _in_backward() -> bool:
    return current_graph_task_id() != -1 or is_recomputing()
