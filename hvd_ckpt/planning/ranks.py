"""One plan for all ranks: rank 0 plans, with the smallest budget of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from hvd_ckpt.planning.budget import BudgetError, parse_budget
from hvd_ckpt.planning.plan import Plan

__all__ = ["on_rank_0"]

Limit = int | float | str | None
_Answer = tuple[str, Any, int, Plan | None]


def on_rank_0(make: Callable[[Limit], Plan], budget: Limit, device: torch.device) -> Plan:
    """``make(budget)``, on rank 0 alone where there are several, and its plan on every rank.

    Raises:
        ValueError, BudgetError: on every rank, what one of them raised.
    """
    if not hvd.is_initialized() or hvd.size() == 1:
        return make(budget)
    local: tuple[str, str] | tuple[str, Limit]
    try:
        wanted = parse_budget(budget)
        in_bytes = wanted.kind in ("bytes", "device")
        local = ("bytes", wanted.bytes(0, 0, device)) if in_bytes else ("other", budget)
    except ValueError as error:
        local = ("error", str(error))
    everyone = hvd.allgather_object(local)
    for rank, (kind, value) in enumerate(everyone):
        if kind == "error":
            raise ValueError(f"rank {rank}: {value}")
    answer: _Answer = _answer(make, everyone) if hvd.rank() == 0 else ("", "", 0, None)
    kind, value, smallest, nearest = hvd.broadcast_object(answer, root_rank=0)
    if kind == "plan":
        result: Plan = value
        return result
    if kind == "budget":
        raise BudgetError(value, smallest, nearest)
    raise ValueError(value) if kind == "value" else RuntimeError(f"planning failed on rank 0: {value}")


def _answer(make: Callable[[Limit], Plan], everyone: list[tuple[str, Limit]]) -> _Answer:
    limits = [value for kind, value in everyone if kind == "bytes"]
    others = {str(value) for kind, value in everyone if kind == "other"}
    if others and (limits or len(others) > 1):
        values = ", ".join(sorted(others | {str(limit) for limit in limits}))
        return (
            "value",
            f"budget: ranks asked for different kinds of budget: {values}. Give all the same.",
            0,
            None,
        )
    limit: Limit = min(limits) if limits else everyone[0][1]  # type: ignore[type-var]
    try:
        return "plan", make(limit), 0, None
    except BudgetError as error:
        return "budget", str(error), error.smallest, error.nearest
    except ValueError as error:
        return "value", str(error), 0, None
    except Exception as error:  # the other ranks wait for an answer
        return "error", f"{type(error).__name__}: {error}", 0, None
