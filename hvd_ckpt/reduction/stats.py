"""Counts of the reducer, which show that gradients are reduced once, in a fixed order, and overlapped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StepStats:
    """Counts of one step: the events between two synchronizations.

    Attributes:
        launch_order: indices of the buckets, in the order in which this rank launched them.
        launches_in_backward: how many of them left before the backward pass was over.
        late_gradients: names of the parameters that arrived after their bucket had left (on any rank). With gradients in shards,
            the group of a late one is launched once more.
        unbucketed_gradients: names of the tensors that were reduced outside the buckets (late parts, new or sparse parameters).
        control_messages: reductions that carried control flags alone.
    """

    launch_order: list[int] = field(default_factory=list)
    launches_in_backward: int = 0
    late_gradients: list[str] = field(default_factory=list)
    unbucketed_gradients: list[str] = field(default_factory=list)
    control_messages: int = 0

    @property
    def launches(self) -> Counter[int]:
        """Launches per bucket."""
        return Counter(self.launch_order)


@dataclass
class ReductionStats:
    """Counts of reductions since the start, and of the last step (``last``).

    Attributes:
        steps: completed synchronizations.
        launches: launches per bucket index since the start.
        launches_in_backward: launches that left before the backward pass was over, since the start.
        late_gradients: parameters whose gradient came after their bucket had left, since the start.
        unbucketed_gradients: tensors that were reduced outside of the buckets, since the start.
        last: the :class:`StepStats` of the last step.
    """

    steps: int = 0
    launches: Counter[int] = field(default_factory=Counter)
    launches_in_backward: int = 0
    late_gradients: int = 0
    unbucketed_gradients: int = 0
    last: StepStats = field(default_factory=StepStats)

    def close_step(self, step: StepStats) -> None:
        """Adds a finished step."""
        self.steps += 1
        self.launches.update(step.launch_order)
        self.launches_in_backward += step.launches_in_backward
        self.late_gradients += len(step.late_gradients)
        self.unbucketed_gradients += len(step.unbucketed_gradients)
        self.last = step
