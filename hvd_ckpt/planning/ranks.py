"""One plan for all ranks, those of other pipeline stages too: rank 0 of stage 0 plans, with the smallest budget of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
import torch

from hvd_ckpt.planning.budget import BudgetError, parse_budget
from hvd_ckpt.processes import parts, watchdog
from hvd_ckpt.processes.grid import current

T = TypeVar("T")
Limit = int | float | str | None


@watchdog.unlimited()
def on_rank_0(make: Callable[[Limit], T], budget: Limit, device: torch.device) -> T:
    """``make(budget)``, on rank 0 alone where there are several, and what it gives on every rank.

    Raises:
        ValueError, BudgetError: on every rank, what one of them raised.
    """
    if not hvd.is_initialized() or current().size == 1:
        return make(budget)
    limit = _smallest_of_all(budget, device)
    answer: T | Exception | None = None
    if current().number == 0:
        try:
            with parts.alone():
                answer = make(limit)
        except (BudgetError, ValueError) as error:
            answer = error if isinstance(error, BudgetError) else ValueError(str(error))
        except Exception as error:  # the other ranks wait for an answer
            answer = RuntimeError(f"planning failed on rank 0: {type(error).__name__}: {error}")
    result: T | Exception = current().gather_objects(
        hvd.broadcast_object(answer, root_rank=0, name="hvd_ckpt.plan")
    )[0]
    if isinstance(result, Exception):
        raise result
    return result


def _smallest_of_all(budget: Limit, device: torch.device) -> Limit:
    """The smallest budget of all ranks, if they are in bytes; else the one that all have.

    Raises:
        ValueError: a rank's budget is invalid, or the ranks ask for different kinds; on every rank.
    """
    local: Limit | ValueError = budget
    try:
        wanted = parse_budget(budget)
        if wanted.is_absolute:
            local = wanted.bytes(0, 0, device)
    except ValueError as error:
        local = ValueError(str(error))
    replicas = current().gather_objects(hvd.allgather_object(local, name="hvd_ckpt.plan.budget"))
    everyone = [one for stage in replicas for one in stage]
    for rank, one in enumerate(everyone):
        if isinstance(one, ValueError):
            raise ValueError(f"rank {rank}: {one}")
    if all(isinstance(one, int) for one in everyone):
        smallest: int = min(everyone)
        return smallest
    if len(set(map(str, everyone))) > 1:
        values = ", ".join(sorted(set(map(str, everyone))))
        raise ValueError(f"budget: ranks asked for different kinds of budget: {values}. Give all the same.")
    return budget
