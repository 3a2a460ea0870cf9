"""The schedule of reduce-scatters: when a group of gradients leaves.

A *round* sends each active group once, in one order that is the same on all ranks, and rounds follow one another. So the launches
of a step are one sequence, in which each rank has a position. A group is complete once every expected parameter has accumulated as
often as it does in a round. This number is learned from the last steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from hvd_ckpt.reduction.accumulation import AccumulationCounts
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.utils.states import Count, State

VERSION = 2


class ScheduleState(State):
    """The schema of a schedule's state, with what :class:`hvd_ckpt.sharding.reducer.ShardReducer` adds to it."""

    version: Count
    order: list[str]
    ordered: bool
    idle_steps: dict[str, Count]
    counts: dict[str, Count] | None
    lower_counts: dict[str, Count]
    agreed_rounds: Count
    may_wait: bool


IDLE_STEPS = 2  # without a gradient on any rank, after which a group is left out


# Two rounds of three groups in the order 2, 0, 1, on two ranks. Both launch the same sequence, and differ in how far they are:
#
#   sequence    2  0  1 | 2  0  1
#   rank 0      x  x  x | x  .  .     position 4: group 0 is not complete again yet
#   rank 1      x  x  . | .  .  .     position 2: group 1 still expects a gradient, and holds back what comes after it


class Schedule:
    """The sequence of launches, and this rank's position in it.

    Args:
        layout: the groups; those that need gradients are active.
        passes: backward passes in a round; None for all those of a step, whatever their number.

    Attributes:
        order: positions (in the layout) of the active groups; the same on every rank.
        ordered: the order is rank 0's order of completion; until then it is the layout's.
        position: how many launches of the sequence this rank has made in this step.
        launched: launches of each group in this step, by its position in the layout.
    """

    def __init__(self, layout: Layout, passes: int | None) -> None:
        self._layout = layout
        self._next_passes = passes
        self.reset()

    def set_passes(self, passes: int) -> None:
        """Another number of backward passes in a round, from the next step on, where that is not all those of a step."""
        if self._next_passes is not None:
            self._next_passes = passes
        if not any(self.launched) and not any(self._arrived_in_round):  # else the step has begun
            self.begin_step()

    def reset(self) -> None:
        """Forgets the order and everything learned."""
        groups = self._layout.groups
        self.order = [group.position for group in groups if group.requires_grad]
        self.ordered = False
        self._counts = AccumulationCounts(len(self._layout.parameters))
        self._idle = [0] * len(groups)
        self.begin_step()

    def grow(self) -> None:
        """The layout has grown. New groups become active when they are first used."""
        fresh = len(self._layout.parameters) - len(self._arrived_in_round)
        self._counts.extend(fresh)
        self._arrived_in_round.extend([0] * fresh)
        self._expected.extend([0] * fresh)
        for counts in (self.launched, self._idle, self._expecting, self._waiting):
            counts.extend([0] * (len(self._layout.groups) - len(counts)))

    # ---------------------------------------------------------------------------------- in a step

    def count(self, index: int) -> bool:
        """Counts one accumulation; returns whether the parameter's group is complete with it."""
        self._counts.count(index)
        arrived = self._arrived_in_round[index] = self._arrived_in_round[index] + 1
        if arrived != self._expected[index]:
            return False
        position = self._layout.group_of[index].position
        self._waiting[position] -= 1
        return not self._waiting[position]

    def ready(self) -> int:
        """The number of groups that may leave now: all up to the next one that expects gradients, if that is complete. If it is
        the last such group of the round, the rest of the round may leave as well.
        """
        # In the order 2, 0, 1, where nothing is expected for group 0: once 2 is complete,
        # it leaves alone. Once 1 is, 0 and 1 leave.
        first = self.position % max(1, len(self.order))
        expecting = [
            number for number in range(first, len(self.order)) if self._expecting[self.order[number]]
        ]
        if not expecting or self._waiting[self.order[expecting[0]]]:
            return 0
        return (expecting[0] + 1 if len(expecting) > 1 else len(self.order)) - first

    def next(self) -> Group:
        """The group that leaves next."""
        return self._layout.groups[self.order[self.position % len(self.order)]]

    def has_left(self, group: Group, in_sequence: bool) -> None:
        """A group has been launched: what accumulates from now on belongs to its next round."""
        self.position += in_sequence
        self.launched[group.position] += 1
        self._waiting[group.position] = self._expecting[group.position]
        for index in group.indices:
            self._arrived_in_round[index] = 0

    def last_arrivals(self) -> list[int]:
        """Place of each group's last accumulation in this step's sequence of them, from 1; 0 if there was none."""
        last = self._counts.last_arrival
        return [max((last[index] for index in group.indices), default=0) for group in self._layout.groups]

    # ---------------------------------------------------------------------------------- between steps

    def _passes_done(self) -> int:
        """Backward passes so far, which are not counted: their number is that of the accumulations that most parameters have."""
        if self._passes is None:
            return 1
        # If most parameters have two accumulations, there were two passes: one with four is used
        # twice. Of equal counts the lower is taken.
        accumulations = Counter(arrived for arrived in self._counts.arrived if arrived)
        return min(accumulations, key=lambda arrived: (-accumulations[arrived], arrived), default=0)

    def close_step(self, learn: bool) -> None:
        """Learns from this step's accumulations (unless told not to) and starts the next step."""
        done = self._passes_done()
        # Counts are learned per backward pass, since the number of passes in a step may change from step to step.
        if done:
            self._counts.arrived = [arrived // done for arrived in self._counts.arrived]
        self._counts.close_step(learn)
        self.begin_step()

    def begin_step(self) -> None:
        """At the start of the sequence; every group waits for what is expected of it."""
        layout = self._layout
        self._passes = self._next_passes
        self.position = 0
        self.launched = [0] * len(layout.groups)
        self._arrived_in_round = [0] * len(layout.parameters)
        if self._counts.learned:
            self._expected = [count * (self._passes or 1) for count in self._counts.expected]
        else:
            self._expected = [
                (self._passes or 1) * parameter.requires_grad for parameter in layout.parameters
            ]
        self._expecting = [
            sum(self._expected[index] > 0 for index in group.indices) for group in layout.groups
        ]
        self._waiting = list(self._expecting)

    def activate(self, used: Set[int]) -> None:
        """Settles which groups are active in the next step, from the parameters that some rank had a gradient for."""
        for group in self._layout.groups:
            position = group.position
            is_active = position in self.order
            if not used.isdisjoint(group.indices):
                self._idle[position] = 0
                if not is_active:
                    # Active again: the order is made anew, from this step's completions on rank 0.
                    self.order.append(position)
                    self.ordered = False
            elif used:  # a step in which no rank had any gradient says nothing about this group
                self._idle[position] += 1
                if self._idle[position] >= IDLE_STEPS and is_active:
                    self.order.remove(position)

    def arrange(self, leaders_last_arrivals: Sequence[float]) -> None:
        """Sets the order of the next step: that of completion on rank 0, from its :meth:`last_arrivals`."""
        if any(leaders_last_arrivals):
            # Sorting is stable, so groups that rank 0 has not completed keep their order behind the others.
            never = float("inf")
            self.order.sort(key=lambda position: leaders_last_arrivals[position] or never)
            self.ordered = True

    # ---------------------------------------------------------------------------------- training state

    def state_dict(self) -> dict[str, Any]:
        """Order and expectations as plain data, by the names of parameters."""
        names, group_of = self._layout.names, self._layout.group_of
        idle = {name: self._idle[group_of[index].position] for index, name in enumerate(names)}
        return {
            "version": VERSION,
            "order": [
                names[index] for position in self.order for index in self._layout.groups[position].indices
            ],
            "ordered": self.ordered,
            "idle_steps": {name: steps for name, steps in idle.items() if steps},
            **self._counts.state_dict(names),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state; groups may be others than when it was saved: one leaves when the last of its parameters did.

        Raises:
            ValueError: the state names a parameter that is not here, or is not one of this reducer.
        """
        if state.get("version") != VERSION or "ordered" not in state:
            raise ValueError(
                f"this is no reduction state of split gradients of version {VERSION} but one of version "
                f"{state.get('version')!r} with {sorted(map(str, state))}; load one that was saved at stage 2 or 3"
            )
        ScheduleState.check(state, "reduction state")
        names, idle = self._layout.names, state["idle_steps"]
        places = {name: place for place, name in enumerate(state["order"])}
        for name in [*places, *(state["counts"] or ())]:
            if name not in names:
                raise ValueError(
                    f"reduction state names parameter '{name}', which this optimizer does not have; "
                    f"load a state that was saved with the same model"
                )
        self.reset()
        # By names, since groups may be others by now: another bucket_cap_mb or other units cut them elsewhere. A group
        # leaves when the last of its parameters did.
        last: dict[int, int] = {}
        for index, name in enumerate(names):
            if name in places:
                position = self._layout.group_of[index].position
                last[position] = max(last.get(position, -1), places[name])
        self.order = sorted(last, key=last.__getitem__)
        self.ordered = bool(state["ordered"])
        for group in self._layout.groups:
            self._idle[group.position] = min(
                (int(idle.get(names[index], 0)) for index in group.indices), default=0
            )
        self._counts.load_state_dict(state, names)
        self.begin_step()
