"""Adasum: combines the ranks' *updates*, not their gradients.

As in Horovod (and Maleki et al. 2021, "Scaling distributed training with adaptive summation"): each rank steps on its own
gradients, and the difference it made to each parameter is combined with the others' by Adasum. Adasum is not linear, so it
is done per tensor, when all gradients are final, in a fixed order; nothing is reduced during the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Adasum, global_process_set

from hvd_ckpt.reduction.collectives import Collectives
from hvd_ckpt.reduction.communicator import decode, encode


def adasum_unavailable() -> str | None:
    """Why Adasum cannot be used in this job, or None."""
    ranks = mpi_ops.size()
    if ranks & (ranks - 1):
        return f"op=Adasum needs a number of ranks that is a power of two, not {ranks}"
    if not mpi_ops.mpi_enabled():
        return "op=Adasum needs MPI, and this job runs over Gloo; launch it with `horovodrun --mpi` or mpirun, or use op=Average"
    return None


def adasum_step(
    named_parameters: Sequence[tuple[str, torch.Tensor]],
    local_step: Callable[[], Any],
    identity: int,
    compression: Any,
) -> None:
    """Runs ``local_step()`` and replaces every parameter's change by the Adasum of all ranks' changes.

    Args:
        named_parameters: all parameters, in the same order on every rank.
        local_step: the wrapped optimizer's own step on this rank's gradients.
    """
    # Adasum needs every rank for each tensor. A parameter that one rank has used is therefore combined on all, changed or not.
    flags = torch.tensor(
        [parameter.grad is not None for _, parameter in named_parameters], dtype=torch.float32
    )
    used = Collectives(global_process_set, f"hvd_ckpt.{identity}.adasum").sum(flags, "flags")
    moving = [(name, parameter) for (name, parameter), ranks in zip(named_parameters, used) if ranks]
    with torch.no_grad():
        starts = [parameter.detach().clone() for _, parameter in moving]
    local_step()
    with torch.no_grad():
        for (name, parameter), start in zip(moving, starts):
            change = parameter.detach() - start
            flat = change.contiguous().view(-1)
            wire, context = encode(flat, compression)
            mpi_ops.synchronize(
                mpi_ops.allreduce_async_(wire, name=f"hvd_ckpt.{identity}.adasum.{name}", op=Adasum)
            )
            decode(wire, context, compression, flat)
            parameter.copy_(start.add_(flat.view(change.shape)))
