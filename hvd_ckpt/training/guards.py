"""What ranks tell each other when something has happened on one of them, and what all of them then do.

A notice costs nothing until there is one: that there is one travels with the gradients
(:meth:`~hvd_ckpt.reduction.optimizer.ReducedOptimizer.notify`), and only then do all ranks gather what each has to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod.torch.mpi_ops import global_process_set
from torch import Tensor

from hvd_ckpt.hosts import host_name
from hvd_ckpt.reduction.agreement import allgather_objects

__all__ = ["CannotGoOn", "NonFiniteLoss", "Notice", "gather", "is_finite", "loss_fault", "stop_reason"]


class CannotGoOn(RuntimeError):
    """Training ends here, and would end here again; one line, raised on every rank alike."""


class NonFiniteLoss(CannotGoOn):
    """A rank's loss is nan or infinite."""


@dataclass(frozen=True)
class Notice:
    """What one rank has to say after a backward pass.

    Attributes:
        stop: who asked it to stop, if somebody did.
        loss: its loss, if that is not finite.
        step: of that loss, counted from 1.
        host: where it runs.
    """

    stop: str | None = None
    loss: float | None = None
    step: int = 0
    host: str = ""

    @classmethod
    def of(cls, stop: str | None, loss: float | None, step: int) -> Notice:
        return cls(stop, loss, step, host_name())


def gather(own: Notice) -> list[Notice]:
    """The notices of all ranks, in rank order. Collective."""
    return allgather_objects(own, global_process_set, "hvd_ckpt.train.notices")


def is_finite(loss: Tensor) -> bool:
    """Whether a loss is a number; waits for the device."""
    return math.isfinite(float(loss))


def stop_reason(notices: list[Notice]) -> str | None:
    """Who asked the first rank that was asked."""
    return next((notice.stop for notice in notices if notice.stop is not None), None)


def loss_fault(notices: list[Notice]) -> str | None:
    """Says which ranks' losses are not finite, if any are."""
    found = [(rank, notice) for rank, notice in enumerate(notices) if notice.loss is not None]
    if not found:
        return None
    rank, notice = found[0]
    others = f" (and on {len(found) - 1} more of {len(notices)} ranks)" if len(found) > 1 else ""
    return f"step {notice.step}: the loss is {notice.loss} on rank {rank}, host {notice.host}{others}"
