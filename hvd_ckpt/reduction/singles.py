"""Gradients that travel by themselves, outside the buckets: late parts, sparse gradients, and those that have no place yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hvd_ckpt.reduction.placement import Placement
from hvd_ckpt.reduction.sparse import empty_sparse_like
from hvd_ckpt.reduction.wire import Wire


@dataclass(frozen=True)
class SingleReductions:
    """Reduces gradients of a placement one by one. Every rank calls the same methods with the same indices.

    Attributes:
        placement, wire: the parameters, and how tensors reach the other ranks.
        done: takes the name of each parameter that is reduced.
    """

    placement: Placement
    wire: Wire
    done: list[str]

    def reduce(self, index: int) -> None:
        """Reduces one dense gradient; a missing one counts as zero."""
        parameter = self.placement.parameters[index]
        self.wire.leave_own_part(parameter)
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        reduced = self._reduced(index, gradient)
        dims = self.placement.densified.get(index)
        parameter.grad = reduced if dims is None else reduced.to_sparse(dims)

    def add_late_parts(self, late: Sequence[int], parts: Mapping[int, torch.Tensor]) -> None:
        """Reduces what came after a bucket had left, and adds it: averaging is linear."""
        for index in late:
            parameter = self.placement.parameters[index]
            part = parts.get(index)
            reduced = self._reduced(index, torch.zeros_like(parameter) if part is None else part)
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                with torch.no_grad():
                    parameter.grad.add_(reduced)

    def reduce_sparse(self, indices: Sequence[int]) -> None:
        """Gathers sparse gradients, in the order of the indices; a missing one counts as empty."""
        for index in sorted(indices):
            parameter = self.placement.parameters[index]
            sparse_dim = self.placement.sparse[index]
            self.wire.leave_own_part(parameter)
            gradient = parameter.grad
            if gradient is None:
                gradient = empty_sparse_like(parameter, sparse_dim)
            elif gradient.layout is torch.strided:
                gradient = gradient.to_sparse(sparse_dim)
            parameter.grad = self.wire.reduce_sparse(index, gradient)
            self.done.append(self.placement.names[index])

    def _reduced(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        self.done.append(self.placement.names[index])
        return self.wire.reduce_single(index, gradient)
