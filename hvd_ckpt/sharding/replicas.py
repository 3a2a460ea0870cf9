"""Gradients of logical replicas at stage 2: added in the tree of :mod:`hvd_ckpt.reduction.tree`; each rank keeps its shards.

A bucket has the parameters of one group of the layout. When it leaves, the sums of earlier replicas are added to it. An alltoall
gives each rank its shard of all ranks' sums, which it adds in the upper part of the tree. Only single parameters are gathered,
whose gradients came late or for the first time. So the sums equal those of gradients that are not split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import Bucket, view_of
from hvd_ckpt.reduction.collectives import Work
from hvd_ckpt.reduction.communicator import sum_dtype
from hvd_ckpt.reduction.gradients import has_values
from hvd_ckpt.reduction.machine import Facts
from hvd_ckpt.reduction.results import Change
from hvd_ckpt.reduction.tree import ReplicaReducer, TreeCommunicator, add_rows
from hvd_ckpt.sharding.exchange import Exchange
from hvd_ckpt.sharding.formats import WireFormat
from hvd_ckpt.sharding.gradients import ShardedGradient
from hvd_ckpt.sharding.layout import Group, Layout


class _TreeFormat(WireFormat):
    """``fp32`` whose rows are added in the tree; they are changed."""

    def sum(self, wire: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        torch.mul(add_rows(wire), scale, out=out)


class ShardedTreeCommunicator(TreeCommunicator):
    """Reduces buckets, each of one group's parameters, to this rank's shards.

    Args:
        replicas: number of replicas of all ranks.
        layout, exchange: layout and exchange of the sharded optimizer.
    """

    def __init__(self, replicas: int, layout: Layout, exchange: Exchange) -> None:
        super().__init__(replicas, exchange.process_set)
        self.layout, self.exchange = layout, exchange

    def rename(self, prefix: str) -> None:
        super().rename(prefix)
        self.exchange.rename(prefix)

    def carries_flags(self, bucket: Bucket) -> bool:
        """False: no rank gets the end of a bucket of all ranks."""
        return False

    def send(self, bucket: Bucket, flat: torch.Tensor) -> Work:
        group = self.layout.group_of[bucket.indices[0]]
        total = torch.zeros(group.padded, dtype=sum_dtype(flat.dtype), device=flat.device)
        # A bucket has its gradients in the order in which they became final, a group in that of the layout, with padding.
        places = dict(zip(group.indices, self.layout.views(group, total)))
        with torch.no_grad():
            for entry in bucket.entries:
                place = places[entry.index].copy_(view_of(flat, entry))
                self.leaves.add_to(entry.index, place)
        what = f"gradients.{group.position}"
        return self.exchange.reduce_scatter(total, what, 1.0 / self.replicas, _TreeFormat())


class ShardReplicaReducer(ReplicaReducer):
    """Reduces the gradients of logical replicas to this rank's shards. Between steps it holds no gradients.

    Args:
        communicator: has the layout.
        identity: a number that no other live optimizer on these ranks has.

    Attributes:
        used: of each parameter, whether any rank had a gradient for it in the last reduction.
    """

    _communicator: ShardedTreeCommunicator

    def __init__(self, communicator: ShardedTreeCommunicator, identity: int) -> None:
        layout = communicator.layout
        self.used = [False] * len(layout.parameters)
        self._shards: dict[int, torch.Tensor] = {}  # by the group's position
        named = list(zip(layout.names, layout.parameters))
        super().__init__(BucketAssignment(named, float("inf"), self._groups(layout)), communicator, identity)

    @staticmethod
    def _groups(layout: Layout) -> list[list[torch.Tensor]]:
        return [layout.parameters_of([group]) for group in layout.groups]

    def add_groups(self) -> None:
        """The layout has grown on every rank; new parameters are reduced from the next synchronization on."""
        layout, known = self._communicator.layout, len(self.used)
        self.used.extend([False] * (len(layout.parameters) - known))
        self.assignment.groups = self._groups(layout)
        self.add_parameters(list(zip(layout.names, layout.parameters))[known:])

    def begin_replica(self) -> None:
        # A new step begins: what the last one has left in shards, and its placeholders, are dropped.
        if not self._computed:
            self.consume()
        super().begin_replica()

    def shard(self, group: Group) -> torch.Tensor | None:
        """This rank's part of a group's reduced gradients, 1-D, in its dtype; None if no rank had any."""
        return self._shards[group.position] if any(self.used[index] for index in group.indices) else None

    def consume(self) -> None:
        """Forgets the result: a step has used it, or was skipped."""
        self._shards.clear()
        self._drop_placeholders()
        self.used[:] = [False] * len(self.used)

    def changes(self) -> list[Change] | None:
        unreduced = any(has_values(parameter.grad) for parameter in self.assignment.parameters)
        return None if self.active or unreduced else []

    def lose(self, parameters: Sequence[torch.Tensor]) -> None:
        super().lose(parameters)
        self.consume()

    def abandon(self) -> None:
        super().abandon()
        self.consume()

    def _launch(self, with_flags: bool = False) -> None:
        super()._launch(with_flags)
        # What has arrived is added up and its buffers are freed, in the order of launches.
        while self._in_flight and self._in_flight[0][1].done():
            self._land_first()

    def _landed(self, bucket: Bucket, result: torch.Tensor) -> None:
        super()._landed(bucket, result)
        group = self._communicator.layout.group_of[bucket.indices[0]]
        self._shards[group.position] = result.to(bucket.dtype)
        bucket.free()

    def synchronize(self) -> None:
        # Placeholders of the last result are no gradients, and must not be reduced.
        self._drop_placeholders()
        super().synchronize()
        for parameter, name, used in zip(self._parameters, self._names, self.used):
            if used:
                parameter.grad = ShardedGradient(parameter, name)

    def _drop_placeholders(self) -> None:
        for parameter in self._parameters:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None

    def _synchronize(self) -> None:
        super()._synchronize()
        for index, parameter in enumerate(self.assignment.parameters):
            if parameter.grad is not None:  # was reduced by itself, and is whole
                self._keep_own_part(index, parameter.grad)
                parameter.grad = None

    def _assign_gradients(self, used: set[int], keep: set[int]) -> None:
        for bucket in self.assignment.buckets:
            for entry in bucket.entries if bucket.launched and not bucket.void else ():
                if entry.index not in keep:
                    entry.parameter.grad = None
        for index in used:
            self.used[index] = True

    def _keep_own_part(self, index: int, gradient: torch.Tensor) -> None:
        """Puts this rank's part of a reduced gradient in its place.

        Raises:
            RuntimeError: the parameter was converted; the same on every rank.
        """
        layout, rank = self._communicator.layout, self._communicator.exchange.rank
        if not layout.fits(index):
            raise RuntimeError(layout.changed(index))
        group = layout.group_of[index]
        if group.position not in self._shards:
            self._shards[group.position] = torch.zeros(
                group.shard_numel, dtype=group.dtype, device=group.device
            )
        for span in group.spans(rank):
            if span.parameter == index:
                whole = layout.specs[index].flatten(gradient)
                span.of(self._shards[group.position]).copy_(whole[span.start : span.stop])
        self.used[index] = True

    def _end_step(self, facts: Facts | None = None) -> None:
        super()._end_step(facts)
        for bucket in self.assignment.buckets:
            bucket.free()
