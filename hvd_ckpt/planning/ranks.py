"""One plan for all ranks of all pipeline stages: rank 0 of stage 0 plans with the smallest budget of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
import torch

from hvd_ckpt.planning.budget import BudgetError, parse_budget
from hvd_ckpt.processes import watchdog
from hvd_ckpt.processes.grid import current

T = TypeVar("T")
Limit = int | float | str | None


@watchdog.unlimited()
def on_rank_0(make: Callable[[Limit], T], budget: Limit, device: torch.device) -> T:
    """Calls ``make(budget)`` on rank 0 and returns its result on every rank.

    Raises:
        ValueError, BudgetError: one rank raised it; raised on every rank.
    """
    if not hvd.is_initialized() or hvd.size() * current().stages == 1:
        return make(budget)
    limit = _smallest_of_all(budget, device)
    answer: T | Exception | None = None
    if hvd.rank() == 0 and current().stage == 0:
        try:
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
    """The smallest budget of all ranks if budgets are in bytes; else the budget that all ranks have.

    Raises:
        ValueError: the budget of a rank is invalid, or ranks have different kinds of budgets; raised on every rank.
    """
    local: Limit | ValueError = budget
    try:
        wanted = parse_budget(budget)
        if wanted.is_absolute:
            local = wanted.bytes(0, 0, device)
    except ValueError as error:
        local = ValueError(str(error))
    replicas = current().gather_objects(hvd.allgather_object(local, name="hvd_ckpt.plan.budget"))
    answers = [answer for stage in replicas for answer in stage]
    for rank, answer in enumerate(answers):
        if isinstance(answer, ValueError):
            raise ValueError(f"rank {rank}: {answer}")
    if all(isinstance(answer, int) for answer in answers):
        smallest: int = min(answers)
        return smallest
    if len(set(map(str, answers))) > 1:
        values = ", ".join(sorted(set(map(str, answers))))
        raise ValueError(f"budget: ranks asked for different kinds of budget: {values}. Give all the same.")
    return budget
