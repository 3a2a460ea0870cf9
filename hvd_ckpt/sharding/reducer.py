"""Reduce-scatters gradients group by group during the backward pass; only this rank's shard is kept: stages 2 and 3.

:mod:`hvd_ckpt.reduction.machine` has the protocol. Of groups:

* The launches of a step are a sequence of rounds, each with all active groups in one order (:mod:`.schedule`). A late gradient
  joins the next round of its group, since sums are linear.
* In the backward pass a rank may wait for older launches, so that only few buffers exist at once. It only waits for launches of
  the rounds that every rank made in the last step; all ranks make these again before they synchronize.
* In ``synchronize()`` all ranks launch up to the position that each of them reaches without being told, and sum their flags. If one
  of them is further, or needs more launches of a group, a second message has the furthest position and the greatest need of each
  group, and all ranks follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch.mpi_ops import Average

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import WireFormat
from hvd_ckpt.offload.shards import Offload
from hvd_ckpt.reduction.flags import ControlFlags
from hvd_ckpt.reduction.gradients import DROPPED, OWN, USED
from hvd_ckpt.reduction.machine import Facts, Machine
from hvd_ckpt.reduction.phases import NOT_CLEARED
from hvd_ckpt.sharding import in_flight
from hvd_ckpt.sharding.gradients import PartedGradient
from hvd_ckpt.sharding.in_flight import InFlight, flat_gradients
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.parameters import ShardedParameters
from hvd_ckpt.sharding.schedule import Schedule


@dataclass(frozen=True)
class HowReduced:
    """Options of the reduction of gradients.

    Attributes:
        passes: backward passes that are accumulated in full before a round.
        replicas: number of logical replicas, or None. With them all passes of a step are one round, and a group that leaves once
            more has everything of the step, in place of what it has sent.
    """

    format: WireFormat
    op: int
    prescale: float = 1.0
    passes: int = 1
    replicas: int | None = None

    def scale(self, ranks: int) -> float:
        """Factor of the sum over the ranks."""
        return 1.0 / ((self.replicas or ranks) * self.prescale) if self.op == Average else 1.0


class ShardReducer(Machine):
    """Reduces the gradients of all parameters of a layout into this rank's shards, once per :meth:`synchronize`.

    Needs a name (:meth:`rename`) before the first step.

    Args:
        offload: has the memory of the shards, if that is not the parameters' own.
        store: the parameters of stage 3, which passes may have written; ranks compare what.

    Attributes:
        used: of each parameter, whether any rank had a gradient for it since :meth:`consume`; set by :meth:`synchronize`.
        uncleared: whether any rank had, in the last one, gradients that an earlier step has used and nobody has cleared.
    """

    _tracked = PartedGradient
    _gradients: Sequence[PartedGradient]

    def __init__(
        self,
        layout: Layout,
        exchange: Exchange,
        how: HowReduced,
        offload: Offload | None,
        store: ShardedParameters | None = None,
    ) -> None:
        # Every gradient is watched, new parameters' too: where one has left, a placeholder stands in ``grad`` and must make room.
        super().__init__(layout.names, layout.parameters, range(sys.maxsize), exchange)
        self._identity = self._generation = 0
        self._layout = layout
        self._exchange = exchange
        self._prescale = how.prescale
        self._store = store
        self._in_flight = InFlight(
            exchange, how.format, how.scale(exchange.ranks), offload, layout.groups, adds=how.replicas is None
        )
        self._schedule = Schedule(layout, how.passes if how.replicas is None else None)
        self._needs: list[int] = []  # launches of each group that this rank needs
        self.used, self.uncleared = [False] * len(layout.parameters), False
        self._agreed = len(self._schedule.order)  # position that every rank reaches before they synchronize
        self._may_wait = True

    # ---------------------------------------------------------------------------------- parameters come and go

    def set_passes(self, passes: int) -> None:
        self._schedule.set_passes(passes)

    def add_groups(self) -> None:
        """The layout has grown on every rank; new parameters are reduced from the next synchronization on."""
        fresh = range(len(self.used), len(self._layout.parameters))
        self.used.extend([False] * len(fresh))
        self._schedule.grow()
        self.acquire(fresh)

    def lose(self, parameters: Sequence[torch.Tensor]) -> None:
        super().lose(parameters)
        self.consume()
        for gradient in self._gradients:
            if gradient.state is USED:
                gradient.parameter.grad, gradient.state = None, OWN

    # ---------------------------------------------------------------------------------- changes since the last synchronization

    def changes(self) -> list[Any] | None:
        """None if a gradient is new or was dropped; what a synchronization has left is in shards, and each element on one rank."""
        unchanged = not self.active and not any(
            gradient.unsent is not None
            or gradient.is_zero
            or ((gradient.is_away or gradient.state is DROPPED) and gradient.may_be_changed)
            for gradient in self._gradients
        )
        return [] if unchanged and self.uncleared == self._any_uncleared() else None

    def _any_uncleared(self) -> bool:
        """Whether this rank has gradients that an earlier step has used and nobody has cleared, and the next one would miss."""
        optimizer = self.optimizer()
        uncleared = {id(gradient.parameter) for gradient in self._gradients if gradient.is_uncleared}
        groups = optimizer.param_groups if uncleared and optimizer is not None else ()
        return any(id(parameter) in uncleared for group in groups for parameter in group["params"])

    def check_cleared(self) -> None:
        """Raises RuntimeError, the same on every rank, if a step would miss gradients that nobody has cleared."""
        if self.uncleared:
            raise RuntimeError(NOT_CLEARED)

    # ---------------------------------------------------------------------------------- the backward pass

    def after_accumulation(self, index: int) -> None:
        """Counts the accumulation and launches what has become complete."""
        with self._lock:
            self.active = True
            self._gradients[index].arrived()
            # No thread looks at what has arrived. Each gradient is an occasion to do so.
            self._in_flight.poll()
            if not self._schedule.count(index):
                return
            while ready := self._schedule.ready():
                for _ in range(ready):
                    self._launch_in_backward()

    def _launch_in_backward(self) -> None:
        group = self._schedule.next()
        if self._may_wait:
            # A rank that has nothing to send yet may be in another collective of the backward pass, for which it needs this one.
            self._may_wait = self._in_flight.make_room(group, self._agreed, in_flight.PATIENCE_SECONDS)
        self._launch(group)
        self._step.launches_in_backward += 1

    def _launch(self, group: Group, in_sequence: bool = True) -> None:
        self.hook_parameters()
        self._look_at(group.indices)
        own = [self._gradients[index] for index in group.indices]
        # What has come since a gradient was dropped leaves when all that had left before is taken out.
        parts = [None if gradient.state is DROPPED else gradient.unsent for gradient in own]
        flat, used = self._pack(group, parts)
        del parts  # before there is memory for what arrives
        number = self._schedule.launched[group.position]
        for index in used:
            self._gradients[index].send(None)
        self._in_flight.launch(group, flat, self._schedule.position, number)
        self._schedule.has_left(group, in_sequence)
        self._step.launch_order.append(group.position)

    def _pack(self, group: Group, parts: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, Iterable[int]]:
        """The buffer of a group that is sent, and the parameters that it has something of."""
        return flat_gradients(self._layout, group, parts, self._prescale)

    # ---------------------------------------------------------------------------------- synchronization

    def _settle(self) -> None:
        report = self._report
        converted = next((index for index in range(len(self.used)) if not self._layout.fits(index)), None)
        if converted is not None:
            report.error = report.error or RuntimeError(self._layout.changed(converted))
        if self._store is not None:
            report.error = report.error or self._store.find_written()
            report.written = self._store.take_written()
        report.wanted |= bool(report.written)

    def _exchange_flags(self) -> tuple[Sequence[float], float]:
        schedule = self._schedule
        pending = any(map(self._has_more, range(len(self._gradients))))
        # What this rank sends only now, another one could have waited for in its backward pass. So none waits
        # in the next.
        unsteady = pending or schedule.position < self._agreed
        self._launch_up_to(self._agreed)
        flags, self._needs = self._own_flags(unsteady)
        return self._sum(torch.cat([flags.tensor(), self.weights.encode().cpu()]), "flags"), 1.0

    def _agree(self, facts: Facts) -> None:
        if self._store is not None:
            self._store.check_written([report.written for report in facts.reports])

    def _land(self, facts: Facts) -> None:
        """Afterwards :attr:`used` and :meth:`shard` tell the result."""
        needs: Sequence[int] = ()
        if facts.flags.further > 0:
            # A rank that has launched further did so in its backward pass; the others must follow before anything else is sent.
            self._step.control_messages += 1
            own = torch.tensor([self._schedule.position, *self._needs], dtype=torch.float32)
            position, *needs = map(round, self._exchange.maximum(own, "further"))
            self._launch_up_to(position)
        if facts.dropped:
            self._in_flight.wait_all()
            for index in facts.dropped:
                self._in_flight.discard(self._layout.group_of[index], index)
                self._gradients[index].begin_step()
        self._send_rest(needs)
        self.weights.prepare()
        self._in_flight.wait_all()

    def _learn(self, facts: Facts) -> None:
        schedule = self._schedule
        # Ranks may wait in the next backward pass only for rounds that each of them makes there: those of this step.
        whole_rounds = max(1, schedule.position // max(1, len(schedule.order)))
        used = set(facts.used)
        schedule.activate(used)
        if not schedule.ordered:
            # Zeros on other ranks make the sum that of rank 0.
            arrivals = torch.tensor(schedule.last_arrivals(), dtype=torch.float32)
            schedule.arrange(self._sum(arrivals * float(self._exchange.rank == 0), "place"))
        self._agreed = whole_rounds * len(schedule.order)
        self._may_wait, self.uncleared = facts.flags.unsteady == 0, facts.flags.uncleared > 0
        for index, gradient in enumerate(self._gradients):
            self.used[index] = index in used or (self.used[index] and index not in facts.dropped)
            if self.used[index]:
                gradient.send(None)
        # Weights are verified of all that has been used, where they are whole.
        if self._store is None and not used.issubset(self.weights.compared):
            self.weights.compare(used.union(self.weights.compared))

    def _launch_up_to(self, position: int) -> None:
        """Makes the launches of the sequence up to a position, with zeros where there are no gradients."""
        while self._schedule.position < position:
            group = self._schedule.next()
            self._in_flight.make_room(group)
            self._launch(group)

    def _has_more(self, index: int) -> bool:
        """Whether this rank has something of a gradient that has not left."""
        return self._gradients[index].unsent is not None

    def _own_flags(self, unsteady: bool) -> tuple[ControlFlags, list[int]]:
        """What this rank knows after it has launched as far as every rank does.

        Returns:
            Its flags, and for each group, how many launches this rank needs.
        """
        launched = self._schedule.launched
        used, needs = [False] * len(self.used), list(launched)
        for index, (gradient, group) in enumerate(zip(self._gradients, self._layout.group_of)):
            if self._has_more(index):
                used[index], needs[group.position] = True, launched[group.position] + 1
            elif gradient.is_zero:  # a group sends zeros for what it has no gradient of, once at least
                used[index], needs[group.position] = True, max(needs[group.position], 1)
            elif gradient.state is not DROPPED:
                used[index] = gradient.is_away or self.used[index]
        further = self._schedule.position > self._agreed or needs != launched
        asked = (self._report.wanted, self.notice, further, unsteady, self._any_uncleared())
        return ControlFlags(used, [False] * len(used), *map(float, asked)), needs

    def _send_rest(self, needs: Sequence[int]) -> None:
        """Sends groups that some rank still has gradients of, but no further round: late ones, and those not active so far."""
        order = self._schedule.order
        others = [group.position for group in self._layout.groups if group.position not in set(order)]
        for position in [*order, *others]:
            group = self._layout.groups[position]
            while needs and self._schedule.launched[position] < needs[position]:
                self._in_flight.make_room(group)
                # The position stays: whole rounds up to it are what all ranks make in the next step without being told.
                self._launch(group, in_sequence=False)

    # ---------------------------------------------------------------------------------- the result

    def shard(self, group: Group) -> torch.Tensor | None:
        """This rank's part of the group's reduced gradients, 1-D, float32 where they are of a narrower type.

        Returns:
            None if no rank had a gradient for any of its parameters since :meth:`consume`.
        """
        if not any(self.used[index] for index in group.indices):
            return None
        return self._in_flight.shards[group.position]

    def consume(self) -> None:
        """Forgets the result: a step has used it, or was skipped."""
        self.uncleared = False
        self._in_flight.clear()
        for index, gradient in enumerate(self._gradients):
            if self.used[index]:
                gradient.consume()
                self.used[index] = False

    # ---------------------------------------------------------------------------------- gradients of zeros

    def begin_clearing(self) -> None:
        # The placeholders of what no step has used can be dropped but not set to zero. A step of replicas drops zeros, too.
        self.consume()

    def set_zero(self, parameter: torch.Tensor) -> None:
        self._gradients[self._number_of[id(parameter)]].place_used(is_zero=True)

    # ---------------------------------------------------------------------------------- between steps

    def end_step(self, facts: Facts | None = None) -> None:
        super().end_step(facts)
        self._schedule.close_step(facts is not None)
        for gradient, used in zip(self._gradients, self.used):
            if not (used and gradient.is_away):
                gradient.begin_step()

    def drop_gradients(self) -> None:
        there = [gradient for gradient in self._gradients if gradient.parameter.grad is not None]
        self.abandon()
        for gradient in there:
            gradient.place_used(is_zero=False)

    def abandon(self) -> None:
        """Drops the step that has begun, its result and all gradients (after an error, or when a state is loaded). On every rank.

        What is in flight completes in memory of its own, under names that are not used again.
        """
        # The ranks may stand at different positions of the schedule; new names keep what is on its way from mixing with what
        # follows.
        self._in_flight.drop()
        for gradient in self._gradients:
            gradient.abandon()
        self.used[:], self.uncleared = [False] * len(self.used), False
        self.renew_names()
        self._agreed, self._may_wait = len(self._schedule.order), True
        self.end_step()

    def reset(self) -> None:
        """Forgets order and expectations: the next step learns them again. Call it on every rank."""
        self._schedule.reset()
        self.abandon()
        self.weights.restart()

    def state_dict(self) -> dict[str, Any]:
        """Order, expectations and what all ranks agreed on, as plain data; the expectations are this rank's own."""
        rounds = self._agreed // max(1, len(self._schedule.order))
        return {**self._schedule.state_dict(), "agreed_rounds": rounds, "may_wait": self._may_wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads order and expectations, so that the next step is reduced as if training had never stopped.

        Raises:
            ValueError: the state names a parameter that is not here, or is not one of this reducer.
        """
        self._schedule.load_state_dict(state)
        self.abandon()
        self.weights.restart()
        self._agreed = int(state["agreed_rounds"]) * len(self._schedule.order)
        self._may_wait = bool(state["may_wait"])
