"""Sparse gradients: gathered, not summed in place (after ``horovod.torch.sparse_allreduce_async``)."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average


def empty_sparse_like(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A sparse zero gradient of ``parameter`` with ``sparse_dim`` sparse dimensions."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def reduce_sparse(gradient: torch.Tensor, name: str, op: int, process_set: Any) -> torch.Tensor:
    """The sum (or mean, for ``Average``) of a sparse COO gradient over the ranks, coalesced.

    Each rank may bring another number of entries. They are summed in rank order, so the result is repeatable.
    """
    gradient = gradient.coalesce()
    values = gradient.values()
    # Horovod gathers no bfloat16; an empty tensor and a longer one meet along the first dimension.
    wire = values if values.dtype in (torch.float16, torch.float32, torch.float64) else values.float()
    entries = mpi_ops.allgather_async(
        gradient.indices().t().contiguous(), name=f"{name}.indices", process_set=process_set
    )
    parts = mpi_ops.allgather_async(wire.contiguous(), name=f"{name}.values", process_set=process_set)
    gathered = mpi_ops.synchronize(parts)
    indices = mpi_ops.synchronize(entries).t()
    if op == Average:
        gathered = gathered / process_set.size()
    summed = torch.sparse_coo_tensor(indices, gathered, gradient.shape, check_invariants=False).coalesce()
    return summed.to(gradient.dtype)
