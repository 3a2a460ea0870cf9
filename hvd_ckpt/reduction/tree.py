"""Gradients of logical replicas, added in one fixed binary tree: the same bits on any number of ranks.

The replicas of a job are the leaves of a full binary tree, and each rank computes an aligned subtree of them, one leaf after the
other. It keeps the sums of the subtrees that are complete, like the digits of a binary counter. During the pass of its last
replica the buckets leave as usual (:mod:`.reducer`), each with these sums added. The ranks' sums are added in the upper part of
the same tree: an alltoall gives each rank its part of all sums, and an allgather collects the parts. Nothing is added inside the
communication library, except over two ranks, where the order of two numbers does not matter. So the bits do not depend on the
number of ranks or on the controller.

A replica without a gradient counts as zeros where another one has some. Half-precision gradients are added in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Sum

from hvd_ckpt.reduction.assignment import BucketAssignment
from hvd_ckpt.reduction.buckets import Bucket, view_of
from hvd_ckpt.reduction.collectives import Work
from hvd_ckpt.reduction.communicator import Communicator, sum_dtype
from hvd_ckpt.reduction.flags import ControlFlags
from hvd_ckpt.reduction.further import dense
from hvd_ckpt.reduction.machine import Facts
from hvd_ckpt.reduction.reducer import Reducer

# Up to this, all ranks' sums are gathered whole and each rank adds them: one message instead of two. At 25 Gbit/s the second
# message takes longer than the further bytes. The last bucket, which all wait for, is that small on 4 ranks.
SMALL_BYTES = 5 << 20


class Leaves:
    """Sums of this rank's replicas so far, by the level of the tree that they have reached; of each, a gradient per parameter."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, dict[int, torch.Tensor]]] = []  # levels fall

    def add(self, gradients: dict[int, torch.Tensor]) -> None:
        """Adds the gradients of the next replica, by parameter; they are changed."""
        # As a binary counter: after replicas 0 to 2 the sums are r0 + r1 at level 1 and r2 at level 0. Replica 3 carries twice,
        # to (r2 + r3) and then (r0 + r1) + (r2 + r3) at level 2.
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, earlier = self._sums.pop()
            for index in earlier.keys() | gradients.keys():
                if index in earlier and index in gradients:
                    earlier[index].add_(gradients[index])
                else:  # zeros are added, which makes 0.0 of -0.0
                    earlier[index] = earlier.get(index, gradients.get(index)).add_(0.0)  # type: ignore[union-attr]
            gradients = earlier
            level += 1
        self._sums.append((level, gradients))

    def add_to(self, index: int, total: torch.Tensor) -> None:
        """Adds what there is of a parameter to its gradient of the last replica, in place."""
        # The lowest level first, since the last replica is its neighbour in the tree. A
        # missing gradient adds 0.0, as add() does.
        for _, gradients in reversed(self._sums):
            total.add_(gradients.get(index, 0.0))

    @property
    def indices(self) -> set[int]:
        """The parameters that have a gradient."""
        return {index for _, gradients in self._sums for index in gradients}

    def sum(self) -> dict[int, torch.Tensor]:
        """The gradients of all replicas so far, a power of two."""
        ((_, gradients),) = self._sums
        return gradients

    def clear(self) -> None:
        """Forgets everything."""
        self._sums.clear()


def add_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum [m] of a power of two ``rows`` [n, m], neighbours first; ``rows`` are changed."""
    while len(rows) > 1:
        rows = rows[0::2].add_(rows[1::2])
    return rows[0]


class TreeCommunicator(Communicator):
    """Reduces what the last replica of each rank has, with the :class:`Leaves` of the earlier ones, to the mean over replicas.

    Args:
        replicas: number of replicas of all ranks.
        process_set: a power of two ranks.
    """

    def __init__(self, replicas: int, process_set: Any) -> None:
        super().__init__(process_set)
        self.replicas, self.leaves = replicas, Leaves()

    @property
    def flag_scale(self) -> float:
        return 1.0 / self.replicas

    def send_whole(self, bucket: Bucket, flat: torch.Tensor, what: str) -> Work:
        """Launches the sum of a bucket, with the :class:`Leaves`; ``flat`` stays as it is."""
        alone = not self.leaves.indices
        total = flat.detach().to(sum_dtype(flat.dtype), copy=not alone)
        if alone:
            return self._tree_sum(total, what, keep=True)
        with torch.no_grad():
            for entry in bucket.entries:
                self.leaves.add_to(entry.index, view_of(total, entry))
        return self._tree_sum(total, what)

    def mean(self, values: Sequence[torch.Tensor], what: str) -> torch.Tensor:
        """The mean over all replicas of a 1-D float tensor that each of them has; ``values`` are this rank's, in order."""
        return self.begin_mean(values, what).wait(what)

    def begin_mean(self, values: Sequence[torch.Tensor], what: str) -> Work:
        """Begins a :meth:`mean`."""
        leaves = Leaves()
        for value in values:
            leaves.add({0: value.detach().clone()})
        return self._tree_sum(leaves.sum()[0], what)

    def _tree_sum(self, total: torch.Tensor, what: str, keep: bool = False) -> Work:
        """Starts to add up all ranks' ``total`` in the upper part of the tree, divided by the number of replicas.

        Args:
            total: total of this rank's subtree, 1-D and contiguous; over one rank or two it becomes the result.
            keep: leave ``total`` as it is.
        """
        if total.is_complex():
            real = self._tree_sum(torch.view_as_real(total).view(-1), what, keep)
            return real.then(lambda result: torch.view_as_complex(result.view(-1, 2)))
        ranks, numel, scale = self.process_set.size(), total.numel(), 1.0 / self.replicas
        what = f"{what}.{numel}"
        name = f"{self.prefix}.{what}"
        # What travels, by the number of ranks:
        #
        #   1                none
        #   2                an allreduce, in which a + b = b + a
        #   more, if small   an allgather; each rank adds up all sums
        #   more             an alltoall, and an allgather of what each rank has added up
        #   hosts, if large  an alltoall in each host, one across, and the allgather; a host is a subtree, so the bits are the same
        if ranks == 1 or not numel:
            result = total * scale if keep else total.mul_(scale)
            return Work((), lambda _: result)
        if ranks == 2:
            allreduce = mpi_ops.allreduce_async if keep else mpi_ops.allreduce_async_
            handle = allreduce(total, name=name, op=Sum, postscale_factor=scale, process_set=self.process_set)
            return Work([(name, handle)], lambda results: results[0])
        if total.nbytes * ranks <= SMALL_BYTES or numel < ranks:
            return self.allgather(total.view(1, -1), what).then(lambda rows: add_rows(rows).mul_(scale))
        # Rank r gets part r of every rank's sum. Of 10 elements, 4 ranks get 3, 3, 3 and 1.
        part = -(-numel // ranks)
        what, hosts = f"reduce_scatter.{what}", self.levels_of(total.nbytes)

        def gather(rows: torch.Tensor) -> Work:
            return self.allgather(add_rows(rows).mul_(scale), f"{what}.sums")

        if len(hosts) > 1:
            padded = torch.nn.functional.pad(total, (0, ranks * part - numel))
            rows = self.exchange_in_levels(hosts, padded, what, lambda flat, n: flat.view(n, -1), add_rows)
            return rows.followed_by(gather).then(lambda result: result[:numel])
        splits = [max(0, min(part, numel - part * rank)) for rank in range(ranks)]
        own, name = splits[self.process_set.rank()], f"{self.prefix}.{what}"
        handle = mpi_ops.alltoall_async(
            total, torch.tensor(splits, dtype=torch.int32), name=name, process_set=self.process_set
        )
        return Work([(name, handle)], lambda results: results[0][0].view(ranks, own)).followed_by(gather)


class ReplicaReducer(Reducer):
    """Reduces the gradients of logical replicas, of which this rank computes as many as any other.

    :meth:`begin_replica` and :meth:`end_replica` enclose the passes of each, and buckets leave during the last one. The results of
    a step are in separate storage, so that a late gradient can still be added in its place; its parameter is then reduced again.

    Attributes:
        local: number of the replicas that each rank computes.
    """

    _communicator: TreeCommunicator

    def __init__(self, assignment: BucketAssignment, communicator: TreeCommunicator, identity: int) -> None:
        self._holding = False
        self._computed = 0
        self._last: dict[int, torch.Tensor] = {}  # gradients of the last replica, whose buckets are done
        super().__init__(assignment, communicator, identity, sparse_as_dense=True, keep_buckets=True)
        self.local = communicator.replicas // communicator.process_set.size()

    @property
    def is_alone(self) -> bool:
        """False where this rank computes several replicas: ``grad`` holds the last one's gradient, never the result."""
        return self._communicator.replicas == 1

    def begin_replica(self) -> None:
        """The passes of this rank's next replica follow; gradients that are there already are dropped."""
        self._holding = self._computed < self.local - 1
        for parameter in self.assignment.parameters:
            parameter.grad = None

    def end_replica(self) -> None:
        """Puts the gradients of the replica aside, unless it is the last one."""
        self._computed += 1
        if not self._holding:
            return
        self._holding = False
        self._look_at(range(len(self.assignment.parameters)))
        gradients = {}
        for index, parameter in enumerate(self.assignment.parameters):
            if parameter.grad is not None:
                gradient = dense(parameter.grad.detach())
                gradients[index] = gradient.to(sum_dtype(gradient.dtype))
                parameter.grad = None
        # The buckets still have the results of the last step. Freed now, these do not lie beside the sums
        # while the next replica is computed.
        for bucket in self.assignment.buckets:
            bucket.free()
        with torch.no_grad():
            self._communicator.leaves.add(gradients)

    def before_accumulation(self, index: int) -> None:
        if not self._holding:
            super().before_accumulation(index)

    def after_accumulation(self, index: int) -> None:
        if self._holding:
            self.active = True
            self._gradients[index].arrived()
        else:
            super().after_accumulation(index)

    def synchronize(self) -> None:
        """Reduces the gradients of this step's replicas. Collective.

        Raises:
            RuntimeError: this rank has not computed all its replicas; also what the method of the base class raises.
        """
        if self.active and self._computed != self.local:
            raise RuntimeError(
                f"{self._computed} of this rank's {self.local} replicas are computed; before optimizer.step(), compute each of "
                f"optimizer.local_replicas() within `with replica:`"
            )
        for parameter in self.assignment.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        super().synchronize()

    def _launch(self, with_flags: bool = False) -> None:
        super()._launch(with_flags)
        # A bucket's second message leaves as soon as its first one is here. Ranks may differ in when they send it, and in which
        # order: Horovod begins a message once all ranks have asked for its name.
        for _, work in self._in_flight:
            work.advance(block=False)

    def _control_flags(self) -> ControlFlags:
        flags = super()._control_flags()
        used = list(flags.used)
        for index in self._communicator.leaves.indices:
            if index < len(used):
                used[index] = True
        return flags._replace(used=used)

    def _landed(self, bucket: Bucket, result: torch.Tensor) -> None:
        # The views of the last replica live on in ``_last``: a late part of one is added to them, not to the result.
        filled = ((entry.index, entry.view) for entry in bucket.entries if entry.filled)
        self._last.update((index, view) for index, view in filled if view is not None)
        bucket.free()
        bucket.flat = result.to(bucket.dtype)

    def _reduce_late(self, parts: Mapping[int, torch.Tensor | None]) -> None:
        # The whole gradient once more: a sum of sums would be another one.
        again: dict[int, torch.Tensor | None] = {}
        for index, part in parts.items():
            last = self._last.get(index)
            again[index] = (
                last + part if last is not None and part is not None else last if part is None else part
            )
        for index, reduced in self._further.reduce(again).items():
            self.assignment.parameters[index].grad = reduced

    def _end_step(self, facts: Facts | None = None) -> None:
        super()._end_step(facts)
        self._communicator.leaves.clear()
        self._last.clear()
        self._computed, self._holding = 0, False
