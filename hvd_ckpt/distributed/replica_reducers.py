"""Gradients of logical replicas, whole (stages 0 and 1) or in shards (stage 2), with the same bits: sums of :mod:`.tree`.

During the passes of a rank's replicas but the last one their gradients are put aside. During those of the last one the buckets or
groups leave as usual, each with what was put aside added to it. A gradient that comes late leaves once more, with all of it, in
place of what has left: the sum of two sums would be another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import Average

from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import sum_dtype
from hvd_ckpt.distributed.tree import TREE, Leaves, TreeCommunicator
from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import Bucket
from hvd_ckpt.reduction.flags import ControlFlags
from hvd_ckpt.reduction.further import dense
from hvd_ckpt.reduction.gradients import DROPPED
from hvd_ckpt.reduction.machine import Facts, Machine
from hvd_ckpt.reduction.reducer import Reducer
from hvd_ckpt.sharding.layout import Group, Layout
from hvd_ckpt.sharding.reducer import HowReduced, ShardReducer


class ComputesReplicas(Machine):
    """Base of the reducers of logical replicas, of which this rank computes as many as any other.

    :meth:`begin_replica` and :meth:`end_replica` enclose the passes of each.

    Attributes:
        local: number of the replicas that each rank computes.
    """

    def __init__(self, replicas: int, leaves: Leaves, *given: Any) -> None:
        self._replicas, self._leaves = replicas, leaves
        self._holding = False
        self._computed = 0
        # What has left of the last replica's gradients, by parameter.
        self._last: dict[int, torch.Tensor] = {}
        super().__init__(*given)
        self.local = replicas // self.process_set.size()

    @property
    def is_alone(self) -> bool:
        """False where this rank computes several replicas: ``grad`` holds the last one's gradient, never the result."""
        return self._replicas == 1

    def begin_replica(self) -> None:
        """The passes of this rank's next replica follow; gradients that are there already are dropped."""
        self._holding = self._computed < self.local - 1
        for parameter in self._parameters:
            parameter.grad = None

    def end_replica(self) -> None:
        """Puts the gradients of the replica aside, unless it is the last one."""
        self._computed += 1
        if not self._holding:
            return
        self._holding = False
        self._look_at(range(len(self._parameters)))
        gradients = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                gradient = dense(parameter.grad.detach())
                gradients[index] = gradient.to(sum_dtype(gradient.dtype))
                parameter.grad = None
        with torch.no_grad():
            self._leaves.add(gradients)

    def before_accumulation(self, index: int) -> None:
        if not self._holding:
            super().before_accumulation(index)

    def after_accumulation(self, index: int) -> None:
        if self._holding:
            self.active = True
            self._gradients[index].arrived()
        else:
            super().after_accumulation(index)  # type: ignore[safe-super]  # that of the reducer

    def _settle(self) -> None:
        super()._settle()  # type: ignore[safe-super]  # that of the reducer
        # Also where the gradients of an earlier step are there: as one replica's they would count less.
        there = self.active or any(parameter.grad is not None for parameter in self._parameters)
        if there and self._computed != self.local:
            self._report.error = self._report.error or RuntimeError(
                f"{self._computed} of this rank's {self.local} replicas are computed; before optimizer.step(), compute each of "
                f"optimizer.local_replicas() within `with replica:`"
            )

    def _whole(self, index: int, part: torch.Tensor | None) -> torch.Tensor | None:
        """What has left of the last replica's gradient, and a late part."""
        last = self._last.get(index)
        return part if last is None else last if part is None else last + part

    def end_step(self, facts: Facts | None = None) -> None:
        super().end_step(facts)
        self._leaves.clear()
        self._last.clear()
        self._computed, self._holding = 0, False


class ReplicaReducer(ComputesReplicas, Reducer):
    """Reduces the gradients of logical replicas to whole ones. The results of a step are in storage apart from what has left."""

    def __init__(self, assignment: BucketAssignment, communicator: TreeCommunicator, identity: int) -> None:
        leaves, sparse_as_dense, keep_buckets = communicator.leaves, True, True
        given = (assignment, communicator, identity, sparse_as_dense, keep_buckets)
        super().__init__(communicator.replicas, leaves, *given)

    def begin_replica(self) -> None:
        super().begin_replica()
        # The buckets still have the results of the last step. Freed now, these do not lie beside the sums.
        for bucket in self.assignment.buckets if self._holding else ():
            bucket.free()

    def synchronize(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        super().synchronize()

    def _launch(self, with_flags: bool = False) -> None:
        super()._launch(with_flags)
        # A bucket's second message leaves as soon as its first one is here. Ranks may differ in when they send it, and in which
        # order: Horovod begins a message once all ranks have asked for its name.
        for _, work in self.in_flight:
            work.advance(block=False)

    def _control_flags(self) -> ControlFlags:
        flags = super()._control_flags()
        return flags._replace(
            used=[used or index in self._leaves.indices for index, used in enumerate(flags.used)]
        )

    def _landed(self, bucket: Bucket, result: torch.Tensor) -> None:
        # The views of the last replica live on in ``_last``.
        filled = ((entry.index, entry.view) for entry in bucket.entries if entry.filled)
        self._last.update((index, view) for index, view in filled if view is not None)
        bucket.free()
        bucket.hold(result.to(bucket.dtype))

    def _reduce_late(self, parts: Mapping[int, torch.Tensor | None]) -> None:
        again = {index: self._whole(index, part) for index, part in parts.items()}
        for index, reduced in self._further.reduce(again).items():
            self._parameters[index].grad = reduced


class ShardReplicaReducer(ComputesReplicas, ShardReducer):
    """Reduces the gradients of logical replicas to this rank's shards."""

    def __init__(self, replicas: int, layout: Layout, exchange: Exchange) -> None:
        how = HowReduced(TREE, Average, replicas=replicas)
        super().__init__(replicas, Leaves(), layout, exchange, how, None)

    def begin_replica(self) -> None:
        # A new step begins: what the last one has left in shards, and its placeholders, are dropped.
        if not self._computed:
            self.consume()
        super().begin_replica()

    def shard(self, group: Group) -> torch.Tensor | None:
        """As without replicas, in the group's dtype: that of whole gradients."""
        shard = super().shard(group)
        return None if shard is None else shard.to(group.dtype)

    def _has_more(self, index: int) -> bool:
        aside = index in self._leaves.indices
        return super()._has_more(index) or (aside and not self._gradients[index].is_away)

    def _pack(self, group: Group, parts: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, Iterable[int]]:
        left = {index for index in group.indices if self._gradients[index].state is not DROPPED}
        whole = [
            self._whole(index, part) if index in left else None for index, part in zip(group.indices, parts)
        ]
        flat, used = super()._pack(group, whole)
        places = dict(zip(group.indices, self._layout.views(group, flat)))
        self._last.update((index, places[index]) for index in used)
        total = flat.to(sum_dtype(flat.dtype), copy=bool(self._leaves.indices))
        with torch.no_grad():
            for index, place in zip(group.indices, self._layout.views(group, total)):
                self._leaves.add_to(index, place)
        return total, self._leaves.indices.intersection(left).union(used)

    def _land(self, facts: Facts) -> None:
        for index in facts.dropped:
            self._last.pop(index, None)
        super()._land(facts)
