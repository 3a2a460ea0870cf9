"""Adasum: combines the ranks' *updates*, not their gradients.

As in Horovod (and Maleki et al. 2021, "Scaling distributed training with adaptive summation"): each rank steps on its own
gradients, and the difference it made to each parameter is combined with the others' by Adasum. Adasum is not linear, so it
is done per tensor, when all gradients are final, in a fixed order; nothing is reduced during the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Adasum, global_process_set

from hvd_ckpt.collectives.asynchronous import Collectives
from hvd_ckpt.reduction.communicator import decode, encode
from hvd_ckpt.reduction.optimizer import ReducedOptimizer
from hvd_ckpt.reduction.phases import Phase
from hvd_ckpt.reduction.reducer import Reducer


def adasum_unavailable() -> str | None:
    """Why Adasum cannot be used in this job, or None."""
    ranks = mpi_ops.size()
    if ranks & (ranks - 1):
        return f"op=Adasum needs a number of ranks that is a power of two, not {ranks}"
    if not mpi_ops.mpi_enabled():
        return "op=Adasum needs MPI, and this job runs over Gloo; launch it with `horovodrun --mpi` or mpirun, or use op=Average"
    return None


class AdasumOptimizer(ReducedOptimizer):
    """A ``DistributedOptimizer`` whose step combines what the ranks' own steps have changed; ``p.grad`` stays each rank's own."""

    reducer: Reducer
    compression: Any
    reduces_updates = finds_overflow_alone = True
    has_unreduced = False

    def _reduce(self) -> bool:
        self._phase = Phase.SYNCHRONIZED
        return False

    def skip_synchronize(self) -> Any:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def reduce_for_caller(self) -> None:
        """Does nothing: a caller changes this rank's own gradients."""

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        try:
            with super().without_reduction():
                yield
        finally:
            self.reducer.end_step()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Takes a step of the wrapped optimizer, and replaces every parameter's change by the Adasum of all ranks' changes."""
        self.check_own_weights("step()")
        self.keep_groups(self)
        self.reducer.check_owner()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reducer.hook_parameters()
        assignment, prefix = self.reducer.assignment, f"hvd_ckpt.{self.identity}.adasum"
        # Adasum needs every rank for each tensor. A parameter that one rank has used is therefore combined on all, changed or not.
        flags = [parameter.grad is not None for parameter in assignment.parameters]
        used = Collectives(global_process_set, prefix).sum(torch.tensor(flags, dtype=torch.float32), "flags")
        named = zip(assignment.names, assignment.parameters, used)
        moving = [(name, parameter) for name, parameter, ranks in named if ranks]
        with torch.no_grad():
            starts = [parameter.detach().clone() for _, parameter in moving]
        self._local_step(None)
        with torch.no_grad():
            for (name, parameter), start in zip(moving, starts):
                change = parameter.detach() - start
                flat = change.contiguous().view(-1)
                wire, context = encode(flat, self.compression)
                mpi_ops.synchronize(mpi_ops.allreduce_async_(wire, name=f"{prefix}.{name}", op=Adasum))
                decode(wire, context, self.compression, flat)
                parameter.copy_(start.add_(flat.view(change.shape)))
        self.reducer.end_step()
        self._phase, self._had_gradients = Phase.STEPPED, {}
        return loss

    step.hooked = True  # type: ignore[attr-defined]
