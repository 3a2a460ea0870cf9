"""Sums over logical replicas, in one fixed binary tree: the same bits on any number of ranks.

The replicas of a job are the leaves of a full binary tree, and each rank computes an aligned subtree of them, one leaf after the
other. It keeps the sums of the subtrees that are complete, like the digits of a binary counter. What it has of its last replica
leaves with these sums added. The ranks' sums are added in the upper part of the same tree: an alltoall gives each rank its part of
all sums, and an allgather collects the parts where every rank needs all. Nothing is added inside the communication library, except
over two ranks, where the order of two numbers does not matter. So the bits do not depend on the number of ranks or on the
controller.

A replica without a gradient counts as zeros where another one has some. Half-precision gradients are added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Sum

from hvd_ckpt.collectives.asynchronous import Work
from hvd_ckpt.collectives.exchange import Exchange
from hvd_ckpt.collectives.formats import WireFormat, sum_dtype
from hvd_ckpt.reduction.buckets import Bucket, view_of
from hvd_ckpt.reduction.communicator import Communicator

# Up to this, all ranks' sums are gathered whole and each rank adds them: one message instead of two. At 25 Gbit/s the second
# message takes longer than the further bytes. The last bucket, which all wait for, is that small on 4 ranks.
SMALL_BYTES = 5 << 20


class Leaves:
    """Sums of this rank's replicas so far, by the level of the tree that they have reached; of each, a gradient per parameter.

    Attributes:
        indices: the parameters that have a gradient.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, dict[int, torch.Tensor]]] = []  # levels fall
        self.indices: set[int] = set()

    def add(self, gradients: dict[int, torch.Tensor]) -> None:
        """Adds the gradients of the next replica, by parameter; they are changed."""
        # As a binary counter: after replicas 0 to 2 the sums are r0 + r1 at level 1 and r2 at level 0. Replica 3 carries twice,
        # to (r2 + r3) and then (r0 + r1) + (r2 + r3) at level 2.
        self.indices.update(gradients)
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

    def sum(self) -> dict[int, torch.Tensor]:
        """The gradients of all replicas so far, a power of two."""
        ((_, gradients),) = self._sums
        return gradients

    def clear(self) -> None:
        """Forgets everything."""
        self._sums.clear()
        self.indices.clear()


def add_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum [m] of a power of two ``rows`` [n, m], neighbours first; ``rows`` are changed."""
    while len(rows) > 1:
        rows = rows[0::2].add_(rows[1::2])
    return rows[0]


class _TreeFormat(WireFormat):
    """``fp32`` whose rows are added in the tree; they are changed."""

    def sum(self, wire: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        torch.mul(add_rows(wire), scale, out=out)


TREE = _TreeFormat()


class TreeCommunicator(Communicator):
    """Reduces what the last replica of each rank has, with the :class:`Leaves` of the earlier ones, to the mean over replicas."""

    def __init__(self, replicas: int, process_set: Any) -> None:
        super().__init__(process_set)
        self.replicas, self.leaves = replicas, Leaves()
        self.exchange = Exchange(process_set, "")

    def rename(self, prefix: str) -> None:
        super().rename(prefix)
        self.exchange.rename(prefix)

    @property
    def flag_scale(self) -> float:
        return 1.0 / self.replicas

    def send(self, bucket: Bucket, flat: torch.Tensor, what: str) -> Work:
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
        # What travels, by the number of ranks:
        #
        #   1                none
        #   2                an allreduce, in which a + b = b + a
        #   more, if small   an allgather; each rank adds up all sums
        #   more             a reduce-scatter, and an allgather of what each rank has added up
        if ranks == 1 or not numel:
            result = total * scale if keep else total.mul_(scale)
            return Work((), lambda _: result)
        if ranks == 2:
            name, allreduce = (
                f"{self.prefix}.{what}",
                mpi_ops.allreduce_async if keep else mpi_ops.allreduce_async_,
            )
            handle = allreduce(total, name=name, op=Sum, postscale_factor=scale, process_set=self.process_set)
            return Work([(name, handle)], lambda results: results[0])
        if total.nbytes * ranks <= SMALL_BYTES or numel < ranks:
            return self.allgather(total.view(1, -1), what).then(lambda rows: add_rows(rows).mul_(scale))
        rest = -numel % ranks
        whole = torch.nn.functional.pad(total, (0, rest)) if rest else total
        sums = self.exchange.reduce_scatter(whole, what, scale, TREE)
        gathered = sums.then(
            lambda part: self.exchange.all_gather(part, torch.empty_like(whole), what), sends=True
        )
        return gathered.then(lambda result: result[:numel])
