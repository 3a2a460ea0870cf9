"""How a model gets its plan in a cell that leaves what is recomputed to one.

The first training of the cell plans on the model that it is about to train, wrapped and all, as a user would; the plan goes into a
file, and every later training of that cell reads it. So a plan that leaves a trace in the model, or that does not survive
its file, shows up as weights that are off or runs that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_ckpt.bench.compare.engines import Engine
from hvd_ckpt.bench.compare.mixed import AUTOCAST
from hvd_ckpt.bench.compare.workloads import Workload
from hvd_ckpt.planning.plan import Plan

__all__ = ["NoPlan", "apply_plan", "make_plan"]


class NoPlan(Exception):
    """The model cannot be planned for this budget; the message says why."""


def make_plan(
    model: nn.Module,
    workload: Workload,
    engine: Engine,
    *,
    budget: str,
    precision: str,
    device: torch.device,
    file: Path,
) -> None:
    """Plan for each rank's first batch, apply the plan, and let rank 0 write it to ``file``; every rank calls it.

    Raises:
        NoPlan: on every rank, where no chain is found in the model or no plan stays within the budget.
    """
    batch = workload.batches(engine.rank, engine.size, 0)[0].to(device)

    def loss(output: Any) -> torch.Tensor:
        return workload.loss(output, batch.target)

    try:
        plan = engine.plan(
            model,
            *batch.inputs,
            kwargs=batch.shared,
            loss=loss,
            budget=budget,
            autocast=AUTOCAST.get(precision),
        )
    except ValueError as error:
        raise NoPlan(str(error)) from error
    if engine.rank == 0:
        plan.save(file)
    plan.apply(model)


def apply_plan(file: Path) -> Callable[[nn.Module], object]:
    """What gives a model the plan in ``file``."""
    return Plan.load(file).apply
