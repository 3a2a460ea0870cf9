"""Launches each bucket's allreduce once, in a fixed order: the gradients of stages 0 and 1.

:mod:`.machine` has the protocol. Of buckets:

* Bucket *i* + 1 is never launched before bucket *i*. The last bucket leaves in ``synchronize()`` and carries the control flags, in
  its storage if that is float32, uncompressed and summed, and otherwise as a separate reduction.
* The first step has no buckets: it learns in which order gradients become ready on rank 0, assigns the parameters to buckets, and
  reduces at the end. A parameter is assigned when it is first used, so an unused one costs nothing and keeps ``grad is None``.
* Within a step everything but a resynchronization and sparse gradients is an allreduce (nothing is broadcast), so ranks that have
  called ``join()`` can be absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.mpi_ops import Sum

from hvd_ckpt.collectives.agreement import ParameterFacts
from hvd_ckpt.collectives.asynchronous import GRADIENTS, Work
from hvd_ckpt.processes.devices import to_device
from hvd_ckpt.reduction.accumulation import AccumulationCounts
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import Bucket
from hvd_ckpt.reduction.communicator import Communicator, Compression
from hvd_ckpt.reduction.flags import ControlFlags, Report
from hvd_ckpt.reduction.gradients import DROPPED, REDUCED, SENT, summed_again
from hvd_ckpt.reduction.machine import Facts, Machine
from hvd_ckpt.reduction.weights import Sums
from hvd_ckpt.utils.spans import span

if TYPE_CHECKING:
    from hvd_ckpt.reduction.further import FurtherRounds


class Reducer(Machine):
    """Reduces the gradients of all parameters of an assignment, once per call of :meth:`synchronize`.

    Args:
        assignment: the parameters, the same on every rank and in the same order; frozen ones included.
        communicator: how tensors are reduced.
        identity: a number that no other live optimizer on these ranks has.
        sparse_as_dense: reduce sparse gradients in buckets.
        keep_buckets: keep the buckets' storage between steps; False frees it with the gradients.

    Attributes:
        in_flight: buckets that have left and have not been waited for.
    """

    def __init__(
        self,
        assignment: BucketAssignment,
        communicator: Communicator,
        identity: int,
        sparse_as_dense: bool,
        keep_buckets: bool,
    ) -> None:
        # Parameters, by index, whose bucket has left, so that the next accumulation is late. With op=Sum it has all parameters,
        # since nothing may be added to what is a sum already: that would be multiplied by the number of ranks.
        self._watched: set[int] = set()
        self.sums = communicator.op == Sum and communicator.process_set.size() > 1
        self._sums: set[int] = set()  # gradients that were sums when the last backward pass reached them
        super().__init__(assignment.names, assignment.parameters, self._watched, communicator)
        self.assignment = assignment
        self._communicator = communicator
        self.rename(identity, generation=0)
        self._sparse_as_dense = sparse_as_dense
        self._keep_buckets = keep_buckets
        self._counts = AccumulationCounts(len(assignment.parameters))
        self._known = len(assignment.parameters)  # parameters whose facts all ranks have compared
        # Parts that have come after the rest of their gradient has left.
        self._late: dict[int, torch.Tensor] = {}
        self.in_flight: list[tuple[Bucket, Work]] = []
        self._next = 0  # position of the bucket that leaves next
        self._watch_sums()

    # ---------------------------------------------------------------------------------- parameters come and go

    def add_parameters(self, named_parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes in parameters added to the optimizer; the ranks compare them at the next synchronization."""
        for name, parameter in named_parameters:
            index = self.assignment.add(name, parameter)
            if index is not None:
                self._counts.extend(1)
                self.acquire([index])
        self._watch_sums()

    # ---------------------------------------------------------------------------------- the backward pass

    def after_accumulation(self, index: int) -> None:
        """Counts the accumulation and launches what has become final."""
        # Autograd runs a thread for each device, so hooks may run at once. Counts and launches are one state for all of them.
        with self._lock:
            self.active = True
            counts, assignment = self._counts, self.assignment
            arrived = counts.count(index)
            if self.sums and index in self._sums:
                self._report.error = self._report.error or summed_again(self._names[index])
            self._gradients[index].arrived()
            bucket, entry = assignment.bucket_of[index], assignment.entry_of[index]
            if bucket is None or entry is None or bucket.launched:
                return
            expected = counts.expected[index]
            if arrived == expected:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._complete(bucket)
            elif arrived == 1:
                # More parts are to come: accumulate them in the bucket rather than beside it.
                bucket.adopt(entry)
                self._gradients[index].note()

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of the bucket have arrived: launch what can leave, and keep it in its storage if it cannot."""
        buckets = self.assignment.buckets
        # A late part can be added to what has left only if the operation is linear. With Min, Max or
        # Product all buckets wait for synchronize(). A single rank has nobody to send them to.
        may_leave = self._counts.learned and self._communicator.linear and not self.is_alone
        # The last bucket never leaves here: it carries the flags, which are known in synchronize() only.
        while may_leave and self._next < len(buckets) - 1 and buckets[self._next].waiting == 0:
            if not buckets[self._next].may_leave():
                break
            self._look_at(buckets[self._next].indices)
            self._launch()
            self._step.launches_in_backward += 1
        if bucket.launched or bucket is buckets[-1]:  # which is small, and is filled when it leaves
            return
        # An earlier bucket holds this one back. Its gradients move into its storage now, so that the tensors which autograd
        # made for them are freed instead of lying beside it.
        if bucket.fits_parameters() and bucket.may_leave():
            self._look_at(bucket.indices)
            bucket.gather()
            for index in bucket.indices:
                if self._counts.arrived[index]:
                    self._gradients[index].note()

    def _watch_sums(self) -> None:
        if self.sums:
            self._watched.update(range(len(self.assignment.parameters)))

    def before_accumulation(self, index: int) -> None:
        with self._lock:
            if self.sums:  # an error once something has been added, which torch.autograd.grad() does not
                change = self._sums.add if self._gradients[index].is_result else self._sums.discard
                change(index)
            super().before_accumulation(index)

    def _look_at(self, indices: Iterable[int]) -> None:
        for index in indices if self.sums else ():
            if self._gradients[index].is_result:
                self._report.error = self._report.error or summed_again(self._names[index])
        super()._look_at(indices)

    def drop_gradients(self) -> None:
        for gradient in self._gradients if self.active else ():
            gradient.look()
            if gradient.is_away:
                gradient.drop()
            if gradient.parameter.grad is not None:
                gradient.parameter.grad = torch.zeros_like(gradient.parameter)

    # ---------------------------------------------------------------------------------- changes since the last synchronization

    def changes(self) -> list[tuple[int, torch.Tensor | None]] | None:
        if self.active:
            return None
        changed: list[tuple[int, torch.Tensor | None]] = []
        for index, gradient in enumerate(self._gradients):
            own, is_result = gradient.parameter.grad, gradient.state is REDUCED
            if own is not None and (gradient.is_new or not is_result):
                return None
            if is_result and (own is None or gradient.is_changed):
                changed.append((index, own))
        return changed

    def note_changes(self) -> None:
        for gradient in self._gradients:
            gradient.follow()

    # ---------------------------------------------------------------------------------- synchronization

    def _settle(self) -> None:
        for bucket in self.assignment.buckets:
            for index in bucket.indices if bucket.launched else ():
                gradient = self._gradients[index]
                if gradient.state is SENT or gradient.state is DROPPED:
                    continue
                if (part := gradient.unsent) is not None:
                    self._late[index] = part.detach()
        self._report.wanted |= len(self.assignment.parameters) != self._known

    def _land(self, facts: Facts) -> None:
        """Afterwards every ``grad`` is the same on every rank."""
        apart = facts.dropped
        self._assign_gradients(set(facts.used), keep=apart)
        if late := [index for index in facts.late if index not in apart]:
            self._reduce_late({index: self._late.get(index) for index in late})
        if sparse := [index for index in facts.used if index in self.assignment.sparse]:
            self._further.reduce_sparse(sparse)
        if facts.reports:
            for index in apart.difference(facts.used):
                self.assignment.parameters[index].grad = None
            self._further.reduce_apart(sorted(apart.intersection(facts.used)))
            self._make_buckets()

    def _check_weights(self, facts: Facts, values: Sequence[float], scale: float) -> None:
        # Without a resynchronization the flags carry a fingerprint of weights that every rank has laid out alike.
        if not facts.reports:
            super()._check_weights(facts, values, scale)

    def _learn(self, facts: Facts) -> None:
        # Last, since it communicates only for parameters that all ranks have just found in use.
        self._assign_buckets([index for index in facts.used if not self.assignment.has(index)])

    def _exchange_flags(self) -> tuple[Sequence[float], float]:
        """Launches the buckets that have not left yet, waits for all, and returns the summed control flags and their scale."""
        buckets = self.assignment.buckets
        while self._next < len(buckets) - 1:
            self._launch()
        # The flags ride in the last bucket where its dtype can carry them: no message of their own.
        riding = bool(buckets) and buckets[-1].flags > 0
        if buckets:
            self._launch(with_flags=riding)
        flags: list[float] = [] if riding else self._sum(self._all_flags(torch.device("cpu")), "flags")
        # After the flags above have taken the last fingerprint, and before the wait, which hides the work of the next one.
        # Flags that ride in a bucket are multiplied by the prescale factor, and rounded, before they are summed.
        self.weights.prepare(exact=not riding or self._communicator.prescale_factor == 1.0)
        arrived = self._arrive()
        return (arrived, self._communicator.flag_scale) if riding else (flags, 1.0)

    def _all_flags(self, device: torch.device) -> torch.Tensor:
        """This rank's flags, and those of its weights."""
        parts = [self._control_flags().tensor(), self.weights.encode()]
        return torch.cat([to_device(part, device) for part in parts])

    def _control_flags(self) -> ControlFlags:
        # Flags have places for the parameters that all ranks have compared. A rank with
        # further ones asks for a resynchronization.
        used = [parameter.grad is not None for parameter in self.assignment.parameters[: self._known]]
        late = [False] * self._known
        for index in self._late:
            late[index] = True
        return ControlFlags(used, late, float(self._report.wanted), float(self.notice))

    def _launch(self, with_flags: bool = False) -> None:
        """Fills the next bucket and sends it on its way."""
        bucket = self.assignment.buckets[self._next]
        self.hook_parameters()
        bucket.void = not bucket.fits_parameters()
        if bucket.void:
            # The model has been converted since. The other ranks (which should find the same) still expect this bucket; its
            # true gradients are reduced after the resynchronization that this asks for.
            self._report.wanted = True
            self._report.dropped.update(bucket.indices)
            for index in bucket.indices:
                self._gradients[index].state = DROPPED
            flat = torch.zeros(bucket.numel + bucket.flags, dtype=bucket.dtype, device=bucket.device)
        else:
            flat = bucket.gather()
        if bucket.flags:
            with torch.no_grad():
                tail = flat[bucket.numel :]
                tail.copy_(self._all_flags(tail.device)) if with_flags else tail.zero_()
        # From here until it arrives the buffer belongs to Horovod, and a placeholder stands in ``grad``. A change by hand, through
        # a tensor that code has kept, is found by the versions of the views.
        with span(None, f"send bucket {bucket.position}"):
            self.in_flight.append(
                (bucket, self._communicator.send(bucket, flat, f"bucket.{bucket.position}"))
            )
        bucket.launched = True
        self._watched.update(bucket.indices)
        for entry in () if bucket.void else bucket.entries:
            if entry.filled and entry.view is not None:
                self._gradients[entry.index].send(entry.view)
        self._step.launch_order.append(bucket.position)
        self._next += 1

    def _arrive(self) -> list[float]:
        """Waits for all buckets, in order; returns the control flags if the last one carried them."""
        flags: list[float] = []
        for _, work in self.in_flight:  # a second message leaves before the first bucket is waited for
            work.advance(True, GRADIENTS)
        while self.in_flight:
            bucket, work = self.in_flight.pop(0)
            result = work.wait(GRADIENTS)
            if not bucket.void:
                self._landed(bucket, result)
            flags = result[bucket.numel :].tolist() if bucket.flags else []
        return flags

    def _landed(self, bucket: Bucket, result: torch.Tensor) -> None:
        """The result of a bucket is here: in its storage, if nobody has another place for it."""

    @torch.no_grad()
    def _assign_gradients(self, used: set[int], keep: set[int]) -> None:
        """Sets each ``grad`` to what has arrived in its bucket, except those to ``keep``."""
        densified = self.assignment.densified
        for bucket in self.assignment.buckets:
            for entry in bucket.entries:
                index, parameter = entry.index, entry.parameter
                if index in keep:
                    continue
                if index not in used:
                    # On every rank: the zeros that came back are not a gradient. As one, weight
                    # decay and momentum would move the parameter.
                    parameter.grad = None
                elif index in densified:
                    parameter.grad = bucket.view(entry).to_sparse(densified[index])
                else:
                    view = entry.view if entry.view is not None else bucket.view(entry)
                    try:
                        parameter.grad = view
                    except (RuntimeError, TypeError):  # the model was converted after the bucket had left
                        parameter.grad = view.to(parameter.device, parameter.dtype)
            if not self._keep_buckets:
                bucket.free()

    @property
    def _further(self) -> FurtherRounds:
        from hvd_ckpt.reduction.further import FurtherRounds

        return FurtherRounds(self.assignment, self._communicator, self._step.unbucketed_gradients)

    def _reduce_late(self, parts: Mapping[int, torch.Tensor | None]) -> None:
        self._further.add_late(parts)

    # ---------------------------------------------------------------------------------- agreeing on something new

    def _assign_buckets(self, fresh: Sequence[int]) -> None:
        """Gives a place to parameters that are used for the first time, and reduces them.

        The first step comes here with all of them: then buckets are made and launched. Later ones are reduced apart this once, and
        are in a bucket of the next step.
        """
        if not fresh:
            return
        # The other ranks add zeros to the leader's order. This sum stands for a broadcast, from which a
        # rank that has joined could not be absent.
        order = self._counts.last_arrival if self.process_set.rank() == 0 else None
        votes = self.assignment.placement_votes(fresh, order)
        first = not self.assignment.order
        dense, sparse = self.assignment.extend(fresh, self._sum(votes, "place"), self._sparse_as_dense)
        if sparse:
            self._further.reduce_sparse(sparse)
        if first:
            self._make_buckets()
            while self._next < len(self.assignment.buckets):
                self._launch()
            self._arrive()
            self._assign_gradients(set(dense), keep=set())
        else:
            self._further.reduce_apart(dense)
            self._make_buckets()

    def _make_buckets(self) -> None:
        self.assignment.make_buckets()
        self._next = 0
        by, last = self._communicator, self.assignment.buckets[-1] if self.assignment.buckets else None
        # Flags are float32 and summed.
        if last and by.linear and last.dtype is torch.float32 and by.compression is Compression.none:
            # The tail behind the gradients of the last bucket, for 3 parameters 2 * 3 + 5 + 33 = 44 elements:
            #
            #   used x 3 | late x 3 | resynchronize | notice | further | unsteady | uncleared | fingerprint x 33
            last.flags = ControlFlags.size(self._known) + Sums.SIZE
        self.weights.compare([*self.assignment.order, *self.assignment.sparse])

    def _full_report(self) -> Report:
        names, parameters, report = self.assignment.names, self.assignment.parameters, super()._full_report()
        report.table = [
            dataclasses.replace(ParameterFacts.of(*pair), requires_grad=True)  # ranks may freeze differently
            for pair in zip(names, parameters)
        ]
        report.used = [parameter.grad is not None for parameter in parameters]
        return report

    def _agree(self, facts: Facts) -> None:
        # Only now is it certain that all ranks have the same new parameters. The next flags have places for them.
        self._known = len(self.assignment.parameters)
        # The flags were of parameters that all ranks knew; these are of all that any rank has.
        flags = zip(*(report.used for report in facts.reports))
        facts.used = [index for index, used in enumerate(flags) if any(used)]

    # ---------------------------------------------------------------------------------- between steps

    def end_step(self, facts: Facts | None = None) -> None:
        super().end_step(facts)
        self._counts.close_step(facts is not None)
        used = set() if facts is None else set(facts.used)
        for index, gradient in enumerate(self._gradients):
            gradient.begin_step(index in used)
        self._late.clear()
        self.in_flight.clear()
        # Emptied and never replaced: the hooks of all parameters look into this very set.
        self._watched.clear()
        self._watch_sums()
        self._next = 0
        for bucket in self.assignment.buckets:
            bucket.launched = bucket.void = False
            # A parameter that is not expected holds nothing back: a bucket of such ones
            # leaves, as zeros, when the order comes to it.
            bucket.waiting = sum(self._counts.expected[index] > 0 for index in bucket.indices)

    def abandon(self) -> None:
        """Drops the step that has begun (after an error, or when a state is loaded), and all gradients. Call it on every rank.

        Work in flight ends in memory and under names that are not used again.
        """
        for bucket, work in self.in_flight:
            work.forget()
            bucket.free()  # Horovod may still write to this memory, so the next step must not use it
        for parameter in self.assignment.parameters:
            parameter.grad = None
        self.renew_names()
        self.end_step()

    def reset(self) -> None:
        """Forgets order, layout and counts: the next step learns them again. Call it on every rank."""
        self.abandon()
        self.assignment.forget()
        self._counts = AccumulationCounts(len(self.assignment.parameters))
        self._known = len(self.assignment.parameters)
        self.weights.restart()

    def state_dict(self) -> dict[str, Any]:
        """Order, layout and learned counts, as plain data; the counts are this rank's own."""
        counts = self._counts.state_dict(self.assignment.names)
        return {**self.assignment.state_dict(), **counts, "verified_part": self.weights.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads order, layout and counts, so that the next step is reduced as if training had never stopped.

        Raises:
            ValueError: the state names a parameter that is not here, or is of another version.
        """
        self.assignment.load_state_dict(state)  # raises before anything of this reducer has changed
        self.abandon()
        self._known = len(self.assignment.parameters)
        self._counts = AccumulationCounts(self._known)
        self._counts.load_state_dict(state, self.assignment.names)
        self.weights.turn = int(state.get("verified_part", 0))
        # Once more: the assignment has made its buckets without room for flags. The step begins after that,
        # since it sets what the new buckets wait for.
        self._make_buckets()
        self.end_step()
