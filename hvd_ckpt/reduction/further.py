"""Further rounds of a step: what its buckets did not have leaves in buckets that are made for it.

Late parts, gradients of parameters that are used for the first time, and those that were dropped in flight or converted. Gradients
that are sparse lie in no bucket, and are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from horovod.torch.mpi_ops import Average

from hvd_ckpt.collectives.agreement import check_present
from hvd_ckpt.collectives.asynchronous import GRADIENTS
from hvd_ckpt.reduction.assignment import BucketAssignment, lay_out
from hvd_ckpt.reduction.buckets import view_of
from hvd_ckpt.reduction.communicator import Communicator, Compression, encode


@dataclass(frozen=True)
class FurtherRounds:
    """Every rank calls the same methods with the same parameters.

    Attributes:
        done: takes the name of each parameter that is reduced.
    """

    assignment: BucketAssignment
    communicator: Communicator
    done: list[str]

    def reduce(self, gradients: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Reduces gradients, or parts of them, by index; a missing one counts as zero. Returns dense results."""
        self.done.extend(self.assignment.names[index] for index in gradients)
        in_flight, results = [], dict[int, torch.Tensor]()
        with torch.no_grad():
            for bucket in lay_out(list(gradients), self.assignment.parameters, self.assignment.cap_bytes):
                flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
                for entry in bucket.entries:
                    if (gradient := gradients[entry.index]) is not None:
                        view_of(flat, entry).copy_(dense(gradient))
                what = f"further.{bucket.position}.{bucket.numel}"
                in_flight.append((bucket, self.communicator.send(bucket, flat, what)))
        for bucket, work in in_flight:
            flat = work.wait(GRADIENTS).to(bucket.dtype)
            results.update((entry.index, view_of(flat, entry)) for entry in bucket.entries)
        return results

    def add_late(self, parts: Mapping[int, torch.Tensor | None]) -> None:
        """Reduces what came after a bucket had left, and adds it: averaging is linear."""
        for index, reduced in self.reduce(parts).items():
            parameter = self.assignment.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = reduced
            elif gradient.layout is not torch.strided:
                parameter.grad = gradient + reduced.to_sparse(gradient.sparse_dim())
            else:
                with torch.no_grad():
                    gradient.add_(reduced)

    def reduce_apart(self, indices: Sequence[int]) -> None:
        """Reduces whole gradients."""
        parameters = self.assignment.parameters
        for index, reduced in self.reduce({index: parameters[index].grad for index in indices}).items():
            dims = self.assignment.densified.get(index)
            parameters[index].grad = reduced if dims is None else reduced.to_sparse(dims)

    def reduce_sparse(self, indices: Sequence[int]) -> None:
        """Gathers sparse gradients; a missing one counts as empty.

        Raises:
            ValueError: a rank has called ``join()``; on every rank.
        """
        # Of a step, only this and a resynchronization cannot do without a rank that has joined.
        check_present(
            round(self.communicator.sum(torch.ones(1, dtype=torch.float32), "present")[0]),
            self.communicator.process_set,
            f"the sparse gradient of parameter '{self.assignment.names[min(indices)]}'",
            "pass sparse_as_dense=True, or give every rank as many batches",
        )
        for index in sorted(indices):
            parameter, sparse_dim = self.assignment.parameters[index], self.assignment.sparse[index]
            gradient = parameter.grad
            if gradient is None:
                kind, device = parameter.dtype, parameter.device
                places = torch.empty(sparse_dim, 0, dtype=torch.int64, device=device)
                values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=kind, device=device)
                gradient = torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(sparse_dim)
            parameter.grad = self._gather(index, gradient.coalesce())
            self.done.append(self.assignment.names[index])

    def _gather(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The sum (or mean, for ``Average``) of a sparse COO gradient over the ranks, coalesced.

        Each rank may bring another number of entries. They are summed in rank order, so the result is repeatable.
        """
        by, values = self.communicator, gradient.values()
        # An empty tensor and a longer one are joined along the first dimension.
        wire, _ = encode(values, Compression.none)
        works = [
            by.allgather(tensor.contiguous(), f"sparse.{index}.{part}")
            for part, tensor in (("indices", gradient.indices().t()), ("values", wire))
        ]
        indices, gathered = (work.wait(GRADIENTS) for work in works)
        if values.is_complex():
            gathered = torch.view_as_complex(gathered)
        if by.op == Average:
            gathered = gathered / by.process_set.size()
        summed = torch.sparse_coo_tensor(indices.t(), gathered, gradient.shape, check_invariants=False)
        return summed.coalesce().to(gradient.dtype)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that may be sparse, as a dense one."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
