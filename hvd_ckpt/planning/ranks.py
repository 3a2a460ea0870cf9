"""One plan for all ranks of all pipeline stages: rank 0 of stage 0 plans with the smallest budget of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
import torch

from hvd_ckpt.planning.budget import Budget, BudgetError, Given, parse_budget
from hvd_ckpt.processes import watchdog, whole_model
from hvd_ckpt.processes.grid import current

T = TypeVar("T")


# The other ranks wait in one collective while rank 0 measures for minutes, which the watchdog would take for a hang.
@watchdog.unlimited()
def on_rank_0(make: Callable[[Budget], T], budget: Given, device: torch.device) -> T:
    """Calls ``make(budget)`` on rank 0 and returns its result on every rank.

    The budget is parsed here, since a rank with an invalid budget must tell the others.

    Raises:
        ValueError, BudgetError: one rank raised it; raised on every rank.
    """
    if not hvd.is_initialized() or current().size == 1:
        return make(parse_budget(budget))
    limit = _smallest_of_all(budget, device)
    answer: T | Exception | None = None
    if current().number == 0:
        try:
            with whole_model.alone():
                answer = make(limit)
        except (BudgetError, ValueError) as error:
            answer = error if isinstance(error, BudgetError) else ValueError(str(error))
        except Exception as error:  # the other ranks wait for an answer
            answer = RuntimeError(f"planning failed on rank 0: {type(error).__name__}: {error}")
    # Horovod's ranks are the replicas of one stage. Stages other than 0 broadcast None, and all take what stage 0 has, the first.
    result: T | Exception = current().gather_objects(
        hvd.broadcast_object(answer, root_rank=0, name="hvd_ckpt.plan")
    )[0]
    if isinstance(result, Exception):
        raise result
    return result


def _smallest_of_all(budget: Given, device: torch.device) -> Budget:
    """The smallest budget of all ranks if budgets are in bytes; else the budget that all ranks have.

    Raises:
        ValueError: the budget of a rank is invalid, or ranks have different kinds of budgets; raised on every rank.
    """
    local: Budget | ValueError
    try:
        local = parse_budget(budget)
        if local.is_absolute:
            local = Budget("bytes", local.bytes(0, 0, device) or 0)
    except ValueError as error:
        # Not raised here: the other ranks are on their way to the collective below, and would wait in it.
        local = ValueError(str(error))
    replicas = current().gather_objects(hvd.allgather_object(local, name="hvd_ckpt.plan.budget"))
    budgets: list[Budget] = []
    for rank, answer in enumerate(answer for stage in replicas for answer in stage):
        if isinstance(answer, ValueError):
            raise ValueError(f"rank {rank}: {answer}")
        budgets.append(answer)
    if all(budget.kind == "bytes" for budget in budgets):
        return min(budgets, key=lambda budget: budget.value)
    if len(set(budgets)) > 1:
        values = ", ".join(sorted(set(map(str, budgets))))
        raise ValueError(f"budget: ranks asked for different kinds of budget: {values}. Give all the same.")
    return budgets[0]
