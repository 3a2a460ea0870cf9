"""One plan for all ranks of all pipeline stages: rank 0 of stage 0 plans with the smallest budget of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
import torch

from hvd_ckpt.collectives.agreement import of_all_processes, of_first_process, raise_gathered
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
        except (BudgetError, ValueError) as error:  # sent as it is: it may have a plan
            answer = error if isinstance(error, BudgetError) else ValueError(str(error))
        except Exception as error:
            answer = RuntimeError(f"planning failed on rank 0: {type(error).__name__}: {error}")
    result: T | Exception = of_first_process(answer, "hvd_ckpt.plan")
    if isinstance(result, Exception):
        raise result
    return result


def _smallest_of_all(budget: Given, device: torch.device) -> Budget:
    """The smallest budget of all ranks if budgets are in bytes; else the budget that all ranks have, or an error on all ranks."""
    local: Budget | ValueError
    try:
        local = parse_budget(budget)
        if local.is_absolute:
            local = Budget("bytes", local.bytes(0, device) or 0)
    except ValueError as error:  # the other ranks are on their way to the collective below
        local = ValueError(str(error))
    answers = of_all_processes(local, "hvd_ckpt.plan.budget")
    raise_gathered([answer if isinstance(answer, ValueError) else None for answer in answers])
    budgets: list[Budget] = answers
    if all(budget.kind == "bytes" for budget in budgets):
        return min(budgets, key=lambda budget: budget.value)
    if len(set(budgets)) > 1:
        values = ", ".join(sorted(set(map(str, budgets))))
        raise ValueError(f"budget: ranks asked for different kinds of budget: {values}. Give all the same.")
    return budgets[0]
